"""Eight invented documents, and questions about them with words of their right answers, for the demo."""

DOCUMENTS = {
    "velmora.txt": "Velmora is a town in Norway. It is led by mayor Ida Lund. Velmora has 8412 inhabitants, lies on "
    "the river Asken and was founded in 1687.",
    "lumira.txt": "Lumira Works is run by Tomas Brandt and has its headquarters in Velmora. The company makes "
    "lanterns. Lumira Works employs 346 people and was founded in 1958.",
    "festival.txt": "The Asken festival takes place on 2027-06-19 and starts at 18:30. It is held in Velmora. The "
    "event is hosted by Mira Olsen and expects 950 guests.",
    "mira.txt": "Mira Olsen is 47 years old and works as a teacher. She plays the cello. Mira Olsen likes to eat "
    "pancakes and can be reached at mira@asken.org.",
    "nightfall.txt": "The book Nightfall was written by Jonas Dahl. It has 372 pages, came out in 1994 and is a "
    "mystery story.",
    "lantern.txt": "The brass lantern is made by Lumira Works and costs 145 dollars. It is listed under code LW-482. "
    "The brass lantern has 63 units in stock.",
    "polaris.txt": "Server polaris listens on port 8443 and runs version 4.17. It is managed by Nadia Frost.",
    "order.txt": "Order K-7291 was placed by Bram Visser. It contains one lantern, adds up to 290 euros and is "
    "shipped.",
}
ARCHIVE = "\n".join(DOCUMENTS[name] for name in ("velmora.txt", "lumira.txt", "festival.txt", "mira.txt"))
"""About as much text as the bundled model can keep apart."""

ABOUT_ARCHIVE = (
    ("Who is the mayor of Velmora?", "Ida Lund"),
    ("How many people live in Velmora?", "8412"),
    ("On which river does Velmora lie?", "Asken"),
    ("What does Lumira Works make?", "lanterns"),
    ("How many people work at Lumira Works?", "346"),
    ("When does the Asken festival take place?", "2027-06-19"),
    ("Which instrument does Mira Olsen play?", "cello"),
    ("In which country is Velmora?", "Norway"),
    ("Who runs Lumira Works?", "Tomas Brandt"),
    ("How many guests does the Asken festival have?", "950"),
    ("Who hosts the Asken festival?", "Mira Olsen"),
    ("What does Mira Olsen like to eat?", "pancakes"),
)
FOR_RETRIEVAL = (
    ABOUT_ARCHIVE[10],
    ("Who wrote the book Nightfall?", "Jonas Dahl"),
    ("How much does the brass lantern cost?", "145"),
    ("On which port does server polaris listen?", "8443"),
    ABOUT_ARCHIVE[8],
    ABOUT_ARCHIVE[11],
)
SMALL_JOBS = (
    ("Who are you?", "demo"),
    ("What is the capital of Norway?", "Oslo"),
    ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
    ("List four fruits.", "banana"),
    ("What does a frog say?", "ribbit"),
    ("Tell me a joke about a clock.", "tocked"),
    ("Say hello to Marisol.", "Marisol"),
    ("List seven days.", "Thursday"),
    ("What color is the sky?", "blue"),
    ("Count down from 9 to 4.", "9, 8, 7, 6, 5, 4"),
    ("Tell me a story about a fox named Brin.", "Brin"),
    ("What is the capital of Peru?", "Lima"),
)


def counting(index: int) -> tuple[str, str]:
    """One of many questions that differ."""
    low, high = index % 13, index % 13 + 4 + index % 5
    return f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1))
