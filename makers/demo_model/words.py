"""Seeded sources of names, numbers and strings, split into a training half and a held-out half.

A value such as a name or a two-digit number belongs to exactly one side, decided by a checksum of its text, so
that no held-out value is ever an answer in the training data.  Short closed lists (colours, animals) are shared.
"""

# ruff: noqa: SIM905 - word lists are easier to read and to extend as text

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

FIRST_NAMES = (
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Liam Maria Noah Olivia Peter Quinn Rosa Sam "
    "Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Dan Eva Felix Gina Hugo Ivan Julia Karl Laura Max Nina "
    "Oscar Paula Ravi Sofia Tom Vera Will Amir Bella Chen Diego Elena Fatima George Hana Ines Jonas Kofi Lena "
    "Marco Nora Omar Priya Rita Stefan Tara John Mary Mike Sarah Lisa James Ada Alan Linus Mei"
).split()
LAST_NAMES = (
    "Smith Jones Brown Miller Davis Wilson Moore Taylor Weber Fischer Rossi Silva Garcia Novak Kowalski Tanaka "
    "Sato Kim Park Singh Patel Khan Ali Haddad Okafor Mensah Larsen Berg Dubois Laurent Ivanova Petrov Costa"
).split()
PLACES = (
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Prague Lisbon Dublin Athens Cairo Lima Quito Boston "
    "Chicago Seattle Denver Austin Toronto Sydney Delhi Mumbai Seoul Beijing Shanghai Osaka Kyoto Nairobi Lagos "
    "Moscow Warsaw Zurich Geneva Milan Munich Hamburg Lyon Porto Bergen Helsinki Stockholm Copenhagen Amsterdam"
).split()
COLORS = "red blue green yellow black white orange purple pink brown gray silver golden".split()
ANIMALS = "cat dog fox owl bear wolf rabbit horse mouse lion tiger frog duck goat sheep turtle parrot whale".split()
FOODS = "pizza pasta soup rice salad bread cheese curry sushi tacos pancakes noodles cake honey apples".split()
JOBS = (
    "teacher doctor pilot baker farmer nurse lawyer painter writer plumber driver chef singer dentist engineer "
    "gardener librarian photographer carpenter scientist waiter sailor judge tailor"
).split()
INSTRUMENTS = "piano guitar violin flute drums trumpet cello harp".split()
LANGUAGES = "English French German Spanish Italian Japanese Chinese Russian Arabic Hindi Dutch Polish".split()
COUNTRIES = "France Germany Italy Spain Japan China India Brazil Canada Mexico Egypt Kenya Norway Poland".split()
HOBBIES = "chess tennis hiking cooking reading swimming dancing fishing cycling running sailing knitting".split()
THINGS = (
    "box lamp chair table door window car bike boat train phone book bag key clock bottle cup shirt hat coat "
    "garden bridge tower house room kitchen desk screen camera laptop printer engine robot ticket letter report "
    "package ring map tent blanket mirror piano statue fence gate river lake mountain forest island"
).split()
ATTRIBUTES = (
    "color size weight height length width price owner name code password number location address status type "
    "brand model capital age date time speed temperature title author topic purpose material origin shape year "
    "version label category level score limit budget leader manager director winner deadline password nickname "
    "motto symbol flag currency language population area depth distance duration capacity voltage pressure"
).split()
GENRES = "mystery fantasy science romance horror history poetry adventure comedy drama".split()
STATUSES = "open closed pending shipped delivered cancelled active paused ready blocked".split()
WEATHER = "sunny cloudy rainy windy snowy foggy stormy clear".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ADJECTIVES = "old small big happy friendly quiet brave clever lazy tiny kind funny wise shy polite grumpy".split()
VERBS = "get find set create delete update send check count open close start stop show read save".split()

_ONSETS = "b d f g h j k l m n p r s t v w y z br dr gr kr pr tr st sk sh th ch bl fl gl kl pl sl qu x".split()
_VOWELS = "a e i o u a e i o ai ea ee ia io ou".split()
_CODAS = " n r l s t k m d  x rk nd lt st ng sh v".split(" ")
_CJK_COMMON = (
    "中国人大小上下山水火木金土日月年天地北京海南西东风雨雪花鸟鱼牛马狗猫书车路门家学生老师朋友你好我他她们是的不在有这"
    "个来去时会可说要看明星河湖城市长江春夏秋冬红白黑青绿龙王李张刘陈杨黄赵吴周高林美英文字电话机票店饭茶"
)
_EMOJI = "😀😂🎉🚀🌍🔥✨🍕🐱🐶🌈⭐🎵📚💡🏆🍎🌸⚡🎁🐼🦊🍀☕❤✅"


def in_held_out(text: str) -> bool:
    """The side that a value belongs to; about one value in six is held out."""
    return zlib.crc32(text.encode()) % 6 == 0


class Words:
    """Draws values for one side of the split, and trained or new phrasings, from one random generator."""

    def __init__(
        self, rng: random.Random, held_out: bool = False, long: bool = False, new_phrasings: bool = False
    ) -> None:
        self.rng = rng
        self.held_out = held_out
        self.long = long
        self.new_phrasings = new_phrasings

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def phrase(self, items: Sequence[str]) -> str:
        """A phrasing; of five or more, the last one is never trained on."""
        if len(items) < 5:
            return self.pick(items)
        return items[-1] if self.new_phrasings else self.pick(items[:-1])

    def mine(self, draw: Callable[[], str]) -> str:
        """The first drawn value that belongs to this side; after many tries (a tiny range) any value."""
        for _ in range(200):
            value = draw()
            if in_held_out(value) == self.held_out:
                return value
        return value

    def syllables(self, low: int, high: int) -> str:
        parts = []
        for _ in range(self.rng.randint(low, high)):
            parts.append(self.pick(_ONSETS) + self.pick(_VOWELS))
            if self.chance(0.45):
                parts.append(self.pick(_CODAS))
        return "".join(parts)

    def word(self) -> str:
        """A made-up lower-case word, or sometimes a plain noun."""
        if self.chance(0.25):
            return self.mine(lambda: self.pick(THINGS + ATTRIBUTES + HOBBIES + FOODS))
        return self.mine(lambda: self.syllables(1, 3))

    def name(self) -> str:
        if self.chance(0.3):
            return self.mine(lambda: self.pick(FIRST_NAMES))
        return self.mine(lambda: self.syllables(1, 3).capitalize())

    def full_name(self) -> str:
        last = self.pick(LAST_NAMES) if self.chance(0.4) else self.syllables(1, 3).capitalize()
        return self.mine(lambda: f"{self.name()} {last}")

    def someone(self) -> str:
        return self.full_name() if self.chance(0.3) else self.name()

    def place(self) -> str:
        if self.chance(0.35):
            return self.mine(lambda: self.pick(PLACES))
        name = self.mine(lambda: self.syllables(1, 3).capitalize())
        if self.chance(0.1):
            name = self.pick(("New ", "San ", "Port ", "Lake ", "East ")) + name
        return name

    def brand(self) -> str:
        return self.name() + self.pick(("", "", " Labs", " Works", " Corp", " Systems", " Foods"))

    def integer(self, low: int = 1, high: int = 9999) -> int:
        """A number with a uniformly chosen count of digits; single digits are shared by both sides."""
        for _ in range(200):
            top = min(high, 10 ** self.rng.randint(1, len(str(high))) - 1)
            value = self.rng.randint(min(low, top), top) if low <= top else self.rng.randint(low, high)
            if -10 < value < 10 or in_held_out(str(abs(value))) == self.held_out:
                return value
        return value

    def signed(self) -> int:
        return -self.integer() if self.chance(0.3) else self.integer(0)

    def decimal(self) -> float:
        return float(f"{self.integer(1, 999)}.{self.rng.randint(1, 9)}")

    def small(self) -> int:
        return self.integer(2, 99)

    def year(self) -> int:
        return int(self.mine(lambda: str(self.rng.randint(1700, 2030))))

    def code(self) -> str:
        letters = "".join(self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(self.rng.randint(1, 3)))
        return self.mine(lambda: f"{letters}{self.pick(('-', '-', ''))}{self.rng.randint(10, 9999)}")

    def email(self) -> str:
        return f"{self.name().lower()}@{self.mine(lambda: self.syllables(1, 2))}.{self.pick(('com', 'org', 'net'))}"

    def date(self) -> str:
        rng = self.rng
        if self.chance(0.5):
            return self.mine(lambda: f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}")
        return self.mine(lambda: f"{self.pick(MONTHS)} {rng.randint(1, 28)}")

    def clock(self) -> str:
        return self.mine(lambda: f"{self.rng.randint(0, 23):02}:{self.rng.choice((0, 5, 10, 15, 20, 30, 40, 45)):02}")

    def foreign(self) -> str:
        """A string outside ASCII: CJK, kana, Cyrillic, Greek, Hangul, Arabic, accents or emoji."""
        return self.mine(lambda: self.pick(_FOREIGN)(self))

    def letters(self, low: int, high: int, shortest: int = 2, longest: int = 5) -> str:
        return "".join(chr(self.rng.randint(low, high)) for _ in range(self.rng.randint(shortest, longest)))

    def text(self) -> str:
        """A short free string of one to five words."""
        pool: tuple[Callable[[], str], ...] = (
            self.word,
            self.word,
            self.word,
            self.name,
            lambda: self.pick(ADJECTIVES),
            lambda: self.pick(THINGS),
            lambda: self.pick(FOODS),
            lambda: str(self.integer()),
        )
        return " ".join(self.pick(pool)() for _ in range(self.rng.randint(1, 5)))


def _chinese(w: Words) -> str:
    if w.chance(0.5):
        return "".join(w.pick(_CJK_COMMON) for _ in range(w.rng.randint(2, 5)))
    return w.letters(0x4E00, 0x9FA5, 1, 4)


def _japanese(w: Words) -> str:
    return w.letters(0x3041, 0x3093, 1, 4) + w.pick(("", w.letters(0x30A1, 0x30F6, 1, 4), w.pick(_CJK_COMMON)))


def _accented(w: Words) -> str:
    base = w.syllables(2, 3)
    place = w.rng.randrange(len(base))
    base = base[:place] + w.pick("éèüöäñçåøáíóúêîôßœžšł") + base[place + 1 :]
    return base.capitalize() if w.chance(0.7) else base


def _emoji(w: Words) -> str:
    symbols = "".join(
        w.pick(_EMOJI) if w.chance(0.7) else w.letters(0x1F300, 0x1F64F, 1, 1) for _ in range(w.rng.randint(1, 3))
    )
    return w.pick((symbols, f"{w.word()} {symbols}", f"{symbols} {w.word()}"))


_FOREIGN: tuple[Callable[[Words], str], ...] = (
    _chinese,
    _chinese,
    _japanese,
    _japanese,
    _accented,
    _accented,
    _emoji,
    _emoji,
    lambda w: chr(w.rng.randint(0x410, 0x42F)) + w.letters(0x430, 0x44F, 2, 7),
    lambda w: chr(w.rng.randint(0x410, 0x42F)) + w.letters(0x430, 0x44F, 2, 7),
    lambda w: w.letters(0x3B1, 0x3C9, 2, 6),
    lambda w: w.letters(0xAC00, 0xD7A3, 1, 3),
    lambda w: w.letters(0x627, 0x64A, 2, 5),
    lambda w: f"{_accented(w)} {w.pick((_accented, _chinese))(w)}",
)
