"""Small talk, personas, counting, lists, stories, jokes, simple facts, repeating, and remembered facts."""

from __future__ import annotations

from collections.abc import Callable

from makers.demo_model import words as lists
from makers.demo_model.dialogue import Conversation, Expected, Message, assistant, system, user
from makers.demo_model.phrases import (
    CAPITALS,
    HUES,
    JOKE_REQUESTS,
    JOKES,
    LISTS,
    MEMORY,
    NUMBER_WORDS,
    PERSONA_REQUESTS,
    REPEATS,
    ROLES,
    SOUNDS,
    STORIES,
    STORY_REQUESTS,
    TALK,
)
from makers.demo_model.words import Words


def _value(w: Words, kind: str) -> str:
    closed = {"color": lists.COLORS, "food": lists.FOODS, "job": lists.JOBS}
    if kind in closed:
        return w.pick(closed[kind])
    if kind in ("name", "place", "word") and w.chance(0.12):
        return w.foreign()
    draws = {
        "name": w.someone,
        "place": w.place,
        "small": w.small,
        "word": w.word,
        "code": w.code,
        "integer": w.integer,
    }
    return str(draws[kind]())


def talk(w: Words) -> tuple[str, str, list[str]]:
    questions, answer = w.pick(TALK)
    return w.phrase(questions), answer, [answer]


def count(w: Words) -> tuple[str, str, list[str]]:
    low = w.rng.randint(0, 20) if w.chance(0.8) else w.rng.randint(20, 110)
    pair = w.mine(lambda: f"{low} {low + w.rng.randint(2, 12)}").split()
    start, end = int(pair[0]), int(pair[1])
    numbers = [str(number) for number in range(start, end + 1)]
    asked = w.phrase(
        (
            "Count from {a} to {b}.",
            "count from {a} to {b}",
            "Please count from {a} to {b}.",
            "Count up from {a} to {b}.",
            "Can you count from {a} to {b}?",
        )
    )
    if w.chance(0.2):
        numbers.reverse()
        start, end = end, start
        asked = w.pick(("Count down from {a} to {b}.", "Count backwards from {a} to {b}."))
    answer = ", ".join(numbers)
    return asked.replace("{a}", str(start)).replace("{b}", str(end)), answer, [answer]


def name_some(w: Words) -> tuple[str, str, list[str]]:
    kind = w.pick(tuple(LISTS))
    many = w.rng.randint(2, 7)
    said = NUMBER_WORDS[many] if w.chance(0.6) else str(many)
    items = LISTS[kind][:many]
    asked = w.phrase(
        (
            "List {n} {k}.",
            "Name {n} {k}.",
            "Give me {n} {k}.",
            "Give me a list of {n} {k}.",
            "Tell me {n} {k}.",
            "Write a list of {n} {k}.",
        )
    )
    return (
        asked.replace("{n}", said).replace("{k}", kind),
        "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)),
        list(items),
    )


def known_fact(w: Words) -> tuple[str, str, list[str]]:
    kind = w.rng.randrange(4)
    if kind == 0:
        country = w.pick(tuple(CAPITALS))
        return (
            w.phrase(
                (
                    "What is the capital of {}?",
                    "Which city is the capital of {}?",
                    "Tell me the capital of {}.",
                    "Capital of {}?",
                    "Name the capital of {}.",
                )
            ).format(country),
            (f"The capital of {country} is {CAPITALS[country]}."),
            [CAPITALS[country]],
        )
    if kind == 1:
        animal = w.pick(tuple(SOUNDS))
        return (
            w.pick(("What does a {} say?", "What sound does a {} make?", "Which sound does the {} make?")).format(
                animal
            ),
            f"A {animal} says {SOUNDS[animal]}.",
            [SOUNDS[animal]],
        )
    if kind == 2:
        thing = w.pick(tuple(HUES))
        return (
            w.pick(("What color is {}?", "Which color does {} have?", "What is the color of {}?")).format(thing),
            (f"{thing[:1].upper()}{thing[1:]} is {HUES[thing]}."),
            [HUES[thing]],
        )
    a, b = w.rng.randint(0, 9), w.rng.randint(0, 9)
    return (
        w.phrase(
            (
                "What is {} + {}?",
                "What is {} plus {}?",
                "How much is {} plus {}?",
                "Add {} and {}.",
                "Calculate {} + {}.",
            )
        ).format(a, b),
        f"{a} plus {b} is {a + b}.",
        [f"is {a + b}."],
    )


def joke(w: Words) -> tuple[str, str, list[str]]:
    topic, text = w.pick(JOKES)
    if w.chance(0.25):
        text = JOKES[0][1]
        return (
            w.phrase(("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke please.", "Tell a joke")),
            text,
            [text],
        )
    return w.phrase(JOKE_REQUESTS).replace("{x}", topic), text, [text]


def story(w: Words) -> tuple[str, str, list[str]]:
    slots = {
        "{n}": w.name(),
        "{m}": w.name(),
        "{animal}": w.pick(lists.ANIMALS),
        "{p}": w.place(),
        "{adj}": w.pick(lists.ADJECTIVES),
        "{c}": w.pick(lists.COLORS),
        "{t}": w.pick(lists.THINGS),
        "{f}": w.pick(lists.FOODS),
    }
    text, asked = w.pick(STORIES), w.phrase(STORY_REQUESTS)
    for slot, value in slots.items():
        text, asked = text.replace(slot, value), asked.replace(slot, value)
    return asked, text, [slots["{n}"], "The end."]


def repeat(w: Words) -> tuple[str, str, list[str]]:
    draws: tuple[Callable[[], str], ...] = (
        w.text,
        w.word,
        w.foreign,
        lambda: str(w.signed()),
        w.code,
        w.email,
        lambda: f"{w.foreign()} {w.text()}",
        lambda: " ".join(w.word() for _ in range(w.rng.randint(3, 9))),
    )
    text = w.pick(draws)()
    return w.phrase(REPEATS).replace("{x}", text), text, [text]


def hello(w: Words) -> tuple[str, str, list[str]]:
    name = w.foreign() if w.chance(0.15) else w.name()
    return (
        w.phrase(
            ("Say hello to {}.", "Greet {}.", "Please say hello to {}.", "Welcome my friend {}.", "Say hi to {}.")
        ).format(name),
        f"Hello, {name}!",
        [name],
    )


SKILLS = {
    "talk": talk,
    "count": count,
    "list": name_some,
    "fact": known_fact,
    "joke": joke,
    "story": story,
    "repeat": repeat,
    "hello": hello,
}


def chat(w: Words) -> Conversation:
    """One to four independent turns of small jobs."""
    messages: list[Message] = (
        [system(w.pick(("You are a helpful assistant.", "You are demo.", "Be nice.", "You are a friendly assistant.")))]
        if w.chance(0.25)
        else []
    )
    required: list[str] = []
    skill = ""
    for _ in range(w.pick((1, 1, 2, 3, 4))):
        skill = w.pick(("talk", "count", "count", "list", "fact", "fact", "joke", "story", "repeat", "repeat", "hello"))
        asked, answer, required = SKILLS[skill](w)
        messages += [user(asked), assistant(answer)]
    return Conversation("chat", messages, Expected("text", required), None, [skill])


def persona(w: Words) -> Conversation:
    """A one-line persona or rule in the system message, kept over several turns."""
    name = w.name()
    role = f"a {w.pick(lists.ADJECTIVES)} {w.pick(ROLES)}"
    if w.chance(0.3):
        role += f" from {w.place()}"
    messages: list[Message] = []
    if w.chance(0.5):
        introduction = f"I am {name}, {role}."
        messages.append(
            system(
                w.phrase(
                    (
                        f"You are {name}, {role}.",
                        f"Your name is {name} and you are {role}.",
                        f"Act as {name}, {role}.",
                        f"You are {role} called {name}.",
                        f"Play the role of {name}, {role}.",
                    )
                )
            )
        )
        for _ in range(w.rng.randint(1, 2)):
            messages += [user(w.phrase(PERSONA_REQUESTS)), assistant(introduction)]
        return Conversation("persona", messages, Expected("text", [introduction]))
    word = w.pick((w.word(), w.name(), w.foreign(), "Arr", "Sure"))
    first = w.chance(0.5)
    messages.append(
        system(
            w.pick(
                (
                    f'Start every answer with "{word}".',
                    f"Always start your answer with {word}.",
                    f'Begin each reply with "{word}".',
                )
            )
            if first
            else w.pick(
                (
                    f'End every answer with "{word}".',
                    f"Always end your answer with {word}.",
                    f'Finish each reply with "{word}".',
                )
            )
        )
    )
    said = ""
    for _ in range(w.rng.randint(1, 3)):
        asked, answer, _ = SKILLS[w.pick(("talk", "fact", "hello", "count"))](w)
        said = f"{word} {answer}" if first else f"{answer} {word}"
        messages += [user(asked), assistant(said)]
    return Conversation("persona", messages, Expected("exact", said))


def memory(w: Words) -> Conversation:
    """Facts the user tells and asks for later, with other turns in between."""
    chosen = {kind[3].split(" is ")[0].split(" are ")[0]: kind for kind in w.rng.sample(MEMORY, w.rng.randint(1, 4))}
    told = {kind[2]: (kind, _value(w, kind[0])) for kind in chosen.values()}
    messages: list[Message] = [system("You are a helpful assistant.")] if w.chance(0.2) else []
    for kind, value in told.values():
        statement = kind[1].replace("{v}", value)
        greeting = statement in (f"My name is {value}.", f"I am {value}.")
        answer = f"Nice to meet you, {value}!" if greeting else "I will remember that."
        messages += [
            user(w.pick((statement, statement, f"Hi! {statement}" if greeting else statement))),
            assistant(answer),
        ]
        if w.chance(0.3):
            asked, other, _ = SKILLS[w.pick(("talk", "fact", "count", "list"))](w)
            messages += [user(asked), assistant(other)]
    required: list[str] = []
    for kind, value in w.rng.sample(list(told.values()), w.rng.randint(1, len(told))):
        messages += [user(kind[2]), assistant(kind[3].replace("{v}", value))]
        required = [value]
    return Conversation("memory", messages, Expected("text", required))
