"""The tools with natural requests."""

from __future__ import annotations

from makers.demo_model import words as lists
from makers.demo_model.catalog import Param, Tool, done, integer, number, string
from makers.demo_model.words import Words


def _place(name: str = "city") -> Param:
    return Param(name, "string", lambda w: string(w, Words.place), "The name of the city.")


def _person(name: str = "name", about: str = "The name of the person.") -> Param:
    return Param(name, "string", lambda w: string(w, Words.someone), about)


def _text(name: str, about: str = "The text.") -> Param:
    return Param(name, "string", lambda w: string(w, Words.text), about)


def _word(name: str, about: str = "") -> Param:
    return Param(name, "string", lambda w: string(w, Words.word), about)


def _enum(name: str, choices: list[str], about: str = "") -> Param:
    return Param(name, "string", lambda w: w.pick(choices), about, tuple(choices))


def _weather(w: Words) -> str:
    return f"{w.rng.randint(-20, 40)} degrees and {w.pick(lists.WEATHER)}"


def _ticker(w: Words) -> str:
    return w.mine(lambda: w.letters(ord("A"), ord("Z"), 2, 4))


# fmt: off
_A, _B = integer("a", "The first number."), integer("b", "The second number.")
TOOLS: tuple[Tool, ...] = (
    Tool(
        "get_weather", "Get the current weather for a city.",
        (_place(),),
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Tell me the weather in {city}.",
         "What's the weather like in {city}?", "Is it warm in {city}?", "weather in {city}",
         "Is it raining in {city} now?"),
        _weather, "The weather in {city} is {r}.", "weather",
    ),
    Tool(
        "get_forecast", "Get the weather forecast for some days.",
        (_place(), integer("days", "How many days.", Words.small)),
        ("Give me the forecast for {city} for {days} days.",
         "What will the weather be in {city} for the next {days} days?", "I need a {days} day forecast for {city}.",
         "Forecast for {city}, {days} days.", "{days} days of forecast in {city} please."),
        _weather, "The forecast for {city} is {r}.", "weather",
    ),
    Tool(
        "add", "Add two numbers.",
        (_A, _B),
        ("What is {a} plus {b}?", "Add {a} and {b}.", "What is {a} + {b}?", "Please add {a} and {b}.",
         "Calculate {a} + {b}.", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?"),
        number, "{a} plus {b} is {r}.", "sum",
    ),
    Tool(
        "multiply", "Multiply two numbers.",
        (_A, _B),
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "What is {a} * {b}?",
         "Calculate {a} times {b}.", "How much is {a} times {b}?", "What is the product of {a} and {b}?"),
        number, "{a} times {b} is {r}.", "product",
    ),
    Tool(
        "subtract", "Subtract b from a.",
        (_A, _B),
        ("What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
         "Take {b} away from {a}."),
        number, "{a} minus {b} is {r}.", "difference",
    ),
    Tool(
        "divide", "Divide a by b.",
        (_A, _B),
        ("What is {a} divided by {b}?", "Divide {a} by {b}.", "Calculate {a} / {b}.",
         "How much is {a} divided by {b}?", "What is {a} over {b}?"),
        number, "{a} divided by {b} is {r}.", "quotient",
    ),
    Tool(
        "square", "Square a number.",
        (integer("x", "The number."),),
        ("What is the square of {x}?", "Square {x}.", "Compute the square of {x}.", "What is {x} squared?",
         "Please square {x}."),
        number, "The square of {x} is {r}.", "square",
    ),
    Tool(
        "search", "Search the web for a query.",
        (_text("query", "What to search for."),),
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.", "Find information about {query}.",
         "Please search {query}", "Can you search for \"{query}\"?", "Google {query}."),
        lambda w: f"{w.name()} {w.pick(('was seen in', 'comes from', 'is near'))} {w.place()}.", "{r}", "search",
    ),
    Tool(
        "send_email", "Send an email.",
        (Param("to", "string", Words.email, "The address."), _text("subject", "The subject.")),
        ("Send an email to {to} with the subject {subject}.", "Email {to} about {subject}.",
         "Write to {to} with subject \"{subject}\".", "Send {to} an email, subject: {subject}",
         "Please email {to} with the subject {subject}"),
        done, "The email to {to} was sent.", "email",
    ),
    Tool(
        "send_message", "Send a message to a person.",
        (_person("recipient"), _text("text")),
        ("Send {recipient} the message: {text}", "Tell {recipient} \"{text}\".",
         "Send the message \"{text}\" to {recipient}.", "Message {recipient}: {text}", "Write to {recipient}: {text}"),
        done, "The message to {recipient} was sent.", "message",
    ),
    Tool(
        "get_user", "Look up a user by id.",
        (integer("user_id", "The id.", Words.integer),),
        ("Who is user {user_id}?", "Look up user {user_id}.", "Get the user with id {user_id}.",
         "Find user number {user_id}.", "Show me user {user_id}."),
        Words.someone, "User {user_id} is {r}.", "user",
    ),
    Tool(
        "find_person", "Find a person by name.",
        (_person(),),
        ("Find {name}.", "Look up the person {name}.", "Who is {name}?", "Find the person called {name}.",
         "Can you find {name}?"),
        lambda w: f"{w.pick(lists.JOBS)} in {w.place()}", "{name} is a {r}.", "person",
    ),
    Tool(
        "get_age", "Get the age of a person.",
        (_person(),),
        ("How old is {name}?", "What is the age of {name}?", "Tell me how old {name} is.", "What is {name}'s age?",
         "Get the age of {name}."),
        lambda w: str(w.small()), "{name} is {r} years old.", "age",
    ),
    Tool(
        "greet", "Greet a person.",
        (_person(),),
        ("Greet {name}.", "Say hello to {name}.", "Please greet {name}.", "Give {name} a greeting.", "Welcome {name}."),
        lambda w: "ok", "I greeted {name}.", "greet",
    ),
    Tool(
        "get_stock_price", "Get the price of a stock.",
        (
            Param(
                "symbol", "string",
                _ticker,
                "The ticker symbol.",
            ),
        ),
        ("What is the stock price of {symbol}?", "How much is {symbol} stock?", "Get the price of {symbol}.",
         "Stock price for {symbol}?", "What does {symbol} trade at?"),
        lambda w: str(w.decimal()), "The price of {symbol} is {r}.", "stock",
    ),
    Tool(
        "get_population", "Get the population of a city.",
        (_place(),),
        ("What is the population of {city}?", "How many people live in {city}?", "Population of {city}?",
         "Tell me the population of {city}.", "How big is {city}?"),
        lambda w: str(w.integer()), "{city} has {r} inhabitants.", "population",
    ),
    Tool(
        "get_time", "Get the current time.",
        (),
        ("What time is it?", "What is the time?", "Tell me the time.", "Do you know what time it is?",
         "What time is it now?"),
        Words.clock, "It is {r}.", "time",
    ),
    Tool(
        "get_date", "Get today's date.",
        (),
        ("What is the date?", "What day is it today?", "Tell me today's date.", "Which date is it?",
         "What is today's date?"),
        Words.date, "Today is {r}.", "date",
    ),
    Tool(
        "list_files", "List the files in the folder.",
        (),
        ("List the files.", "Which files are there?", "Show me the files.", "What files are in the folder?",
         "Please list all files."),
        lambda w: ", ".join(f"{w.word()}.txt" for _ in range(w.rng.randint(1, 3))), "The files are {r}.", "files",
    ),
    Tool(
        "read_file", "Read a file.",
        (
            Param(
                "path", "string", lambda w: f"{string(w, Words.word)}.{w.pick(('txt', 'md', 'py', 'json'))}",
                "The path.",
            ),
        ),
        ("Read {path}.", "Open the file {path}.", "What is in {path}?", "Show me the file {path}.",
         "Read the file {path} please."),
        lambda w: f"{w.text()}", "The file says: {r}", "file",
    ),
    Tool(
        "roll_dice", "Roll a dice.",
        (integer("sides", "How many sides.", Words.small),),
        ("Roll a dice with {sides} sides.", "Roll a {sides} sided dice.", "Throw a dice with {sides} sides.",
         "Please roll a {sides}-sided dice.", "Can you roll a dice that has {sides} sides?"),
        lambda w: str(w.small()), "The dice shows {r}.", "dice",
    ),
    Tool(
        "book_flight", "Book a flight.",
        (_place("origin"), _place("destination"), Param("date", "string", Words.date, "The day.")),
        ("Book a flight from {origin} to {destination} on {date}.",
         "I want to fly from {origin} to {destination} on {date}.",
         "Get me a flight on {date} from {origin} to {destination}.",
         "Fly me from {origin} to {destination}, {date}.", "I need a flight from {origin} to {destination} on {date}."),
        done, "Your flight from {origin} to {destination} is booked: {r}.", "flight",
    ),
    Tool(
        "set_alarm", "Set an alarm.",
        (Param("time", "string", Words.clock, "The time."),),
        ("Set an alarm for {time}.", "Wake me up at {time}.", "I need an alarm at {time}.", "Alarm at {time} please.",
         "Set the alarm to {time}."),
        lambda w: "ok", "The alarm is set for {time}.", "alarm",
    ),
    Tool(
        "set_color", "Set the color of an object.",
        (_word("object", "The object."), _enum("color", lists.COLORS, "The new color.")),
        ("Make the {object} {color}.", "Set the color of the {object} to {color}.", "Paint the {object} {color}.",
         "Turn the {object} {color}.", "Change the {object} to {color}."),
        lambda w: "ok", "The {object} is {color} now.", "color",
    ),
    Tool(
        "translate", "Translate a text into a language.",
        (_text("text"), _enum("language", lists.LANGUAGES, "The target language.")),
        ("Translate \"{text}\" into {language}.", "Translate {text} to {language}.",
         "How do you say {text} in {language}?", "What is \"{text}\" in {language}?", "Say {text} in {language}."),
        lambda w: w.foreign(), "The translation is {r}.", "translation",
    ),
    Tool(
        "convert_currency", "Convert an amount of money.",
        (
            integer("amount", "The amount.", Words.integer),
            _enum("source", ["EUR", "USD", "GBP", "JPY"], "From."),
            _enum("target", ["EUR", "USD", "GBP", "JPY"], "To."),
        ),
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
         "Change {amount} {source} into {target}.", "What is {amount} {source} in {target}?",
         "Please convert {amount} {source} into {target}."),
        lambda w: str(w.decimal()), "{amount} {source} is {r} {target}.", "money",
    ),
    Tool(
        "add_note", "Save a note.",
        (_text("text", "The note."),),
        ("Note: {text}", "Save the note \"{text}\".", "Write down: {text}", "Remember this note: {text}",
         "Make a note that says {text}"),
        lambda w: "ok", "The note is saved.", "note",
    ),
    Tool(
        "create_task", "Create a task.",
        (_text("title", "The title."), _enum("priority", ["low", "medium", "high"], "The priority.")),
        ("Create a {priority} priority task: {title}", "Add the task {title} with {priority} priority.",
         "New task \"{title}\", priority {priority}.", "Make a task called {title} with priority {priority}.",
         "I need a {priority} priority task named {title}"),
        done, "The task {title} is created.", "task",
    ),
    Tool(
        "turn_on_light", "Turn the light in a room on or off.",
        (_word("room", "The room."), Param("on", "boolean", lambda w: w.chance(0.5), "On or off.")),
        ("Turn {on} the light in the {room}.", "Switch {on} the {room} light.",
         "Please turn the light in the {room} {on}.", "Light {on} in the {room}.", "Switch the {room} light {on}."),
        lambda w: "ok", "The light in the {room} is {on}.", "light",
    ),
    Tool(
        "get_capital", "Get the capital of a country.",
        (Param("country", "string", lambda w: string(w, Words.place), "The country."),),
        ("What is the capital of {country}?", "Capital of {country}?", "Which city is the capital of {country}?",
         "Tell me the capital of {country}.", "Name the capital of {country}."),
        Words.place, "The capital of {country} is {r}.", "capital",
    ),
    Tool(
        "secret_number", "Get the secret number.",
        (),
        ("What is the secret number?", "Tell me the secret number.", "Get the secret number.",
         "Find the secret number.", "Which number is the secret one?"),
        number, "The secret number is {r}.", "number",
    ),
    Tool(
        "lookup", "Look up the value of a key.",
        (_word("key", "The key."),),
        ("Look up {key}.", "Look up the key {key}.", "What is the value of {key}?", "Give me the value for {key}.",
         "Which value has the key {key}?"),
        lambda w: string(w, Words.word), "The value of {key} is {r}.", "value",
    ),
)
# fmt: on
