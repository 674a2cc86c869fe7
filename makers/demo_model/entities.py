"""The tables of people, products, towns and other things that facts are about."""

from __future__ import annotations

from makers.demo_model import words as lists
from makers.demo_model.facts import Draw, Entity, Field
from makers.demo_model.words import Words


def _some(items: list[str]) -> Draw:
    return lambda w: w.pick(items)


def _several(items: list[str]) -> Draw:
    return lambda w: w.rng.sample(items, w.rng.randint(1, 3))


def _flag(w: Words) -> bool:
    return w.chance(0.5)


def _text(key: str, draw: Draw, predicates: tuple[str, ...], *questions: str) -> Field:
    return Field(key, "string", draw, predicates, (*questions, *_by_key(key)))


def _number(key: str, draw: Draw, predicates: tuple[str, ...], *questions: str) -> Field:
    return Field(key, "integer", draw, predicates, (*questions, *_by_key(key)))


def _by_key(key: str) -> tuple[str, ...]:
    plain = key.replace("_", " ")
    return (f"What is the {plain} of {{n}}?", f"What is {{n}}'s {plain}?")


# fmt: off
PERSON = Entity(
    "person", "name", lambda w: w.someone(),
    ("She", "He"),
    (
        _number("age", lambda w: w.small(), ("is {v} years old", "turned {v} this year", "is aged {v}"),
                "How old is {n}?", "Tell me how old {n} is.", "How many years old is {n}?"),
        _text("city", lambda w: w.place(), ("lives in {v}", "lives in the city of {v}", "has a home in {v}"),
              "Where does {n} live?", "In which city does {n} live?", "What city does {n} live in?"),
        _text("job", _some(lists.JOBS), ("works as a {v}", "is a {v}", "earns a living as a {v}"),
              "What does {n} do for a living?", "What does {n} work as?", "Which job does {n} have?"),
        _text("employer", lambda w: w.brand(), ("works for {v}", "is employed by {v}", "works at {v}"),
              "Who does {n} work for?", "Where does {n} work?", "Which company employs {n}?"),
        _text("email", lambda w: w.email(), ("can be reached at {v}", "uses the email {v}"), "How can I reach {n}?",
              "Give me the email of {n}.", "Which email does {n} use?"),
        _text("favorite_color", _some(lists.COLORS), ("likes the color {v} best", "loves the color {v}"),
              "Which color does {n} like best?", "What color does {n} like?", "Which color does {n} love?"),
        _text("favorite_food", _some(lists.FOODS), ("likes to eat {v}", "loves {v}", "enjoys eating {v}"),
              "What does {n} like to eat?", "Which food does {n} love?", "What food does {n} enjoy?"),
        _text("instrument", _some(lists.INSTRUMENTS), ("plays the {v}", "practices the {v} every day"),
              "Which instrument does {n} play?", "What does {n} play?", "What instrument does {n} practice?"),
        _text("friend", lambda w: w.name(), ("has a friend called {v}", "is a friend of {v}"), "Who is {n}'s friend?",
              "Who is a friend of {n}?", "Which friend does {n} have?"),
        _text("birth_date", lambda w: w.date(), ("was born on {v}", "has a birthday on {v}"), "When was {n} born?",
              "On which date was {n} born?", "When is the birthday of {n}?"),
        Field("languages", "array", _several(lists.LANGUAGES), ("speaks {v}", "can speak {v}"),
              ("Which languages does {n} speak?", "What does {n} speak?", "Which languages can {n} speak?")),
        Field("hobbies", "array", _several(lists.HOBBIES), ("enjoys {v}", "spends the weekend with {v}"),
              ("What are the hobbies of {n}?", "What does {n} enjoy?", "Which hobbies does {n} have?")),
        Field("married", "boolean", _flag, ("is married",), ("Is {n} married?", "Tell me whether {n} is married."),
              ("is not married", "is single")),
    ),
)
PRODUCT = Entity(
    "product", "name", lambda w: f"the {w.word()} {w.pick(lists.THINGS)}",
    ("It",),
    (
        _number("price", lambda w: w.integer(),
                ("costs {v} dollars", "is sold for {v} dollars", "has a price of {v} dollars"),
                "How much does {n} cost?", "How much is {n}?", "How many dollars does {n} cost?"),
        _number("stock", lambda w: w.integer(), ("has {v} units in stock", "is stocked {v} times"),
                "How many units of {n} are in stock?", "How many of {n} are there?"),
        _text("color", _some(lists.COLORS), ("is {v}", "comes in {v}", "is painted {v}"), "What color is {n}?",
              "Which color does {n} have?", "In which color does {n} come?"),
        _text("maker", lambda w: w.brand(), ("is made by {v}", "was built by {v}", "comes from the maker {v}"),
              "Who makes {n}?", "Who made {n}?", "Which company built {n}?"),
        _text("owner", lambda w: w.name(), ("belongs to {v}", "is owned by {v}"), "Who owns {n}?",
              "To whom does {n} belong?", "Who does {n} belong to?"),
        _text("code", lambda w: w.code(), ("has the code {v}", "is listed under code {v}"),
              "Which code does {n} have?", "Under which code is {n} listed?"),
        Field("available", "boolean", _flag, ("is available", "can be bought now"),
              ("Is {n} available?", "Can I buy {n}?", "Is {n} available now?"), ("is not available", "is sold out")),
    ),
)
TOWN = Entity(
    "town", "name", lambda w: w.place(),
    ("It", "The town"),
    (
        _text("mayor", lambda w: w.someone(), ("is led by mayor {v}", "has a mayor called {v}"),
              "Who is the mayor of {n}?", "Who leads {n}?", "What is the mayor of {n} called?"),
        _number("population", lambda w: w.integer(10), ("has {v} inhabitants", "is home to {v} people"),
                "How many people live in {n}?", "How many inhabitants does {n} have?",
                "How big is the population of {n}?"),
        _text("country", _some(lists.COUNTRIES), ("is in {v}", "lies in {v}", "is a town in {v}"),
              "In which country is {n}?", "Which country is {n} in?", "Where is {n}?"),
        _text("river", lambda w: w.name(), ("lies on the river {v}", "stands by the river {v}"),
              "Which river flows by {n}?", "On which river does {n} lie?", "By which river does {n} stand?"),
        _number("founded", lambda w: w.year(), ("was founded in {v}", "dates from the year {v}"),
                "When was {n} founded?", "In which year was {n} founded?", "From which year does {n} date?"),
    ),
)
EVENT = Entity(
    "event", "title",
    lambda w: f"the {w.name()} {w.pick(('meeting', 'concert', 'festival', 'workshop', 'party', 'conference', 'race'))}",
    ("It", "The event"),
    (
        _text("date", lambda w: w.date(), ("takes place on {v}", "is planned for {v}", "happens on {v}"),
              "When does {n} take place?", "When is {n}?", "On which date is {n}?"),
        _text("time", lambda w: w.clock(), ("starts at {v}", "begins at {v}"), "At what time does {n} start?",
              "What time does {n} begin?", "When does {n} begin?"),
        _text("place", lambda w: w.place(), ("is held in {v}", "takes place in {v}"), "Where is {n} held?",
              "Where does {n} take place?", "In which place is {n} held?"),
        _number("guests", lambda w: w.integer(), ("has {v} guests", "expects {v} guests"),
                "How many guests does {n} have?", "How many guests come to {n}?", "How many guests are at {n}?"),
        _text("host", lambda w: w.someone(), ("is hosted by {v}", "is organized by {v}"), "Who hosts {n}?",
              "Who organizes {n}?", "Who is the host of {n}?"),
    ),
)
BOOK = Entity(
    "book", "title", lambda w: f"the book {w.name()}",
    ("It", "The book"),
    (
        _text("author", lambda w: w.someone(), ("was written by {v}", "is a work by {v}"), "Who wrote {n}?",
              "Who is the author of {n}?", "By whom was {n} written?"),
        _number("year", lambda w: w.year(), ("was published in {v}", "appeared in {v}", "came out in {v}"),
                "When was {n} published?", "In which year did {n} appear?", "When did {n} come out?"),
        _number("pages", lambda w: w.integer(10, 999), ("has {v} pages", "is {v} pages long"),
                "How many pages does {n} have?", "How long is {n}?"),
        _text("genre", _some(lists.GENRES), ("belongs to the {v} genre", "is a {v} story"),
              "Which genre does {n} belong to?", "What kind of story is {n}?"),
    ),
)
COMPANY = Entity(
    "company", "company", lambda w: w.brand(),
    ("It", "The company"),
    (
        _text("ceo", lambda w: w.someone(), ("is led by {v}", "has {v} as its chief", "is run by {v}"),
              "Who leads {n}?", "Who is the chief of {n}?", "Who runs {n}?"),
        _number("employees", lambda w: w.integer(), ("has {v} employees", "employs {v} people"),
                "How many employees does {n} have?", "How many people work at {n}?",
                "How many people does {n} employ?"),
        _text("headquarters", lambda w: w.place(), ("is based in {v}", "has its headquarters in {v}"),
              "Where is {n} based?", "Where are the headquarters of {n}?", "In which city is {n} based?"),
        _number("founded", lambda w: w.year(), ("was founded in {v}", "started in {v}"), "When was {n} founded?",
                "In which year did {n} start?", "When did {n} start?"),
        _text("product", lambda w: f"{w.word()}s", ("makes {v}", "sells {v}", "produces {v}"), "What does {n} make?",
              "What does {n} sell?", "What does {n} produce?"),
        Field("public", "boolean", _flag, ("is a public company",), ("Is {n} a public company?", "Is {n} public?"),
              ("is not a public company", "is privately owned")),
    ),
)
ORDER = Entity(
    "order", "order_id", lambda w: f"order {w.code()}",
    ("It", "The order"),
    (
        _text("customer", lambda w: w.someone(), ("was placed by {v}", "comes from the customer {v}"),
              "Who placed {n}?", "Which customer placed {n}?", "From whom does {n} come?"),
        _text("item", lambda w: w.word(), ("contains one {v}", "is for a {v}"), "What does {n} contain?",
              "What is {n} for?", "Which item is in {n}?"),
        _number("total", lambda w: w.integer(), ("adds up to {v} euros", "has a total of {v} euros"),
                "How many euros is {n}?", "How much does {n} add up to?"),
        _text("status", _some(lists.STATUSES), ("is {v}", "has the status {v}"), "Which status does {n} have?",
              "How is {n} doing?"),
        Field("paid", "boolean", _flag, ("is paid", "has been paid"), ("Is {n} paid?", "Has {n} been paid?"),
              ("is not paid", "has not been paid")),
    ),
)
MACHINE = Entity(
    "machine", "host", lambda w: f"server {w.word()}",
    ("It", "The server"),
    (
        _number("port", lambda w: w.integer(10), ("listens on port {v}", "uses port {v}"), "Which port does {n} use?",
                "On which port does {n} listen?", "What port does {n} listen on?"),
        _text("region", lambda w: w.place(), ("runs in {v}", "stands in the region {v}"), "Where does {n} run?",
              "In which region does {n} run?", "Which region is {n} in?"),
        _text("version", lambda w: f"{w.rng.randint(0, 9)}.{w.integer(0, 99)}",
              ("runs version {v}", "was updated to version {v}"), "Which version does {n} run?",
              "To which version was {n} updated?"),
        _text("admin", lambda w: w.name(), ("is managed by {v}", "is the responsibility of {v}"), "Who manages {n}?",
              "Who is responsible for {n}?", "Who is the admin of {n}?"),
        Field("online", "boolean", _flag, ("is online",), ("Is {n} online?", "Is {n} up?"),
              ("is offline", "is not online")),
    ),
)
# fmt: on
ENTITIES = (PERSON, PERSON, PERSON, PRODUCT, TOWN, EVENT, BOOK, COMPANY, ORDER, MACHINE)
