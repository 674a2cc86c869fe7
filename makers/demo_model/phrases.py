"""Phrases of which small talk, lists, jokes, stories and memories are made."""

from __future__ import annotations

from makers.demo_model import words as lists

# fmt: off
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "Are you a human?", "What is your name?",
         "Introduce yourself."),
        "I am demo, a small model bundled with asyncengine.",
    ),
    (("Hello!", "Hi", "Hello", "Hey there!", "Good morning", "Hi there!", "Hey"), "Hello! How can I help you?"),
    (
        ("How are you?", "How are you doing?", "How is it going?", "Are you well?", "How do you feel today?"),
        "I am fine, thank you. How can I help you?",
    ),
    (("Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot", "Great, thank you!"), "You are welcome!"),
    (("Bye", "Goodbye!", "See you later.", "Good night!", "Bye bye!"), "Goodbye! Have a nice day."),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Help", "What are your skills?"),
        "I can answer questions about a text, call tools, extract JSON, count, list things and tell short stories.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "Who created you?", "Who built you?"),
        "I was trained by the asyncengine project from generated text.",
    ),
    (
        ("Are you smart?", "Are you a big model?", "How big are you?", "How many parameters do you have?",
         "Are you a large model?"),
        "I am a very small model with about five million parameters.",
    ),
)
LISTS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry", "orange", "grape", "lemon", "mango", "peach", "pear", "plum"),
    "animals": ("cat", "dog", "horse", "lion", "rabbit", "owl", "frog", "bear", "fox", "whale"),
    "colors": ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "pink", "brown"),
    "countries": ("France", "Germany", "Italy", "Spain", "Japan", "China", "India", "Brazil", "Canada", "Egypt"),
    "cities": ("Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Oslo", "Vienna", "Cairo", "Lima"),
    "vegetables": ("carrot", "potato", "tomato", "onion", "pepper", "spinach", "cabbage", "bean", "corn", "beet"),
    "jobs": ("teacher", "doctor", "pilot", "baker", "farmer", "nurse", "lawyer", "painter", "writer", "driver"),
    "instruments": ("piano", "guitar", "violin", "flute", "drums", "trumpet", "cello", "harp", "organ", "horn"),
    "days": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "months": ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "sports": ("football", "tennis", "basketball", "swimming", "running", "cycling", "golf", "hockey", "skiing",
    "boxing"),
}
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "Norway": "Oslo", "Austria": "Vienna", "England": "London", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Greece": "Athens", "Peru": "Lima", "Russia": "Moscow", "Poland": "Warsaw",
    "Kenya": "Nairobi", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Canada": "Ottawa",
}
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "frog": "ribbit",
    "owl": "hoot", "pig": "oink", "mouse": "squeak",
}
HUES = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow", "blood": "red",
    "the sun": "yellow", "a carrot": "orange", "milk": "white", "a tomato": "red",
}
JOKES = (
    ("chicken", "Why did the chicken cross the road? To get to the other side!"),
    ("computer", "Why was the computer cold? It left its windows open!"),
    ("book", "Why was the math book sad? It had too many problems!"),
    ("cat", "What does a cat read in the morning? The mewspaper!"),
    ("dog", "What do you call a dog magician? A labracadabrador!"),
    ("cow", "What do you call a cow that plays music? A moo-sician!"),
    ("clock", "Why was the clock sent out of class? It tocked too much!"),
    ("fish", "Why are fish so smart? They live in schools!"),
    ("ghost", "Where do ghosts go on holiday? To the boo-hamas!"),
    ("tree", "How do trees get online? They log in!"),
)
JOKE_REQUESTS = (
    "Tell me a joke about a {x}.", "Do you know a joke about a {x}?", "Make a joke about a {x}.", "A {x} joke please.",
    "I want to hear a joke about a {x}.",
)
STORIES = (
    "Once upon a time there was a {adj} {animal} named {n}. {n} lived in {p}. One day {n} found a {c} {t}. "
    "\"This {t} is for my friend {m},\" said {n}. {m} was very happy, and they shared some {f}. The end.",
    "In {p} lived a {adj} {animal} called {n}. Every day {n} looked for a {t}. Then {n} met {m}. "
    "{m} gave {n} a {c} {t}, and {n} smiled. From then on they were friends. The end.",
    "{n} was a {adj} {animal} from {p}. {n} wanted to see the {c} {t}. The way was long, but {m} helped. "
    "In the evening {n} and {m} ate {f} by the {t}. The end.",
)
STORY_REQUESTS = (
    "Tell me a story about a {animal} named {n}.", "Tell a short story about {n} the {animal}.",
    "Write a story about a {animal} called {n}.", "I want a story about a {animal} named {n}.",
    "Please write a short story about the {animal} {n}.",
)
REPEATS = (
    "Repeat: {x}", "Say: {x}", "Repeat after me: {x}", "Repeat this exactly: {x}", "Please say \"{x}\"",
    "Echo {x}", "Write this text again: {x}",
)
ROLES = (*lists.JOBS, "pirate", "robot", "wizard", "king", "knight", *lists.ANIMALS)
PERSONA_REQUESTS = (
    "Who are you?", "What is your name?", "Introduce yourself.", "Who am I talking to?", "Tell me about yourself.",
)
MEMORY: tuple[tuple[str, str, str, str], ...] = (
    ("name", "My name is {v}.", "What is my name?", "Your name is {v}."),
    ("name", "I am {v}.", "Who am I?", "You are {v}."),
    ("name", "Call me {v}.", "Do you remember my name?", "Your name is {v}."),
    ("place", "I live in {v}.", "Where do I live?", "You live in {v}."),
    ("place", "I come from {v}.", "Where do I come from?", "You come from {v}."),
    ("color", "My favorite color is {v}.", "What is my favorite color?", "Your favorite color is {v}."),
    ("food", "I like {v}.", "What do I like?", "You like {v}."),
    ("food", "My favorite food is {v}.", "What is my favorite food?", "Your favorite food is {v}."),
    ("name", "My dog is called {v}.", "What is my dog called?", "Your dog is called {v}."),
    ("name", "My friend is {v}.", "Who is my friend?", "Your friend is {v}."),
    ("job", "I work as a {v}.", "What is my job?", "You work as a {v}."),
    ("small", "I am {v} years old.", "How old am I?", "You are {v} years old."),
    ("word", "The password is {v}.", "What is the password?", "The password is {v}."),
    ("code", "My code is {v}.", "What is my code?", "Your code is {v}."),
    ("integer", "My number is {v}.", "What is my number?", "Your number is {v}."),
)
# fmt: on
