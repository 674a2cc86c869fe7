"""Words that mean the same, by what may stand together: the dictionary that the embedder learns.

Between semicolons stands one meaning; the words between its bars may stand for each other. Verbs are in their base
form, from which `verbs.py` makes the others; a tilde is where the object goes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """One idea and the words for it."""

    key: str
    words: tuple[str, ...]

    def word(self, rng: random.Random, besides: str | None = None) -> str:
        """One of the words, another one than `besides` where there is one."""
        others = [word for word in self.words if word != besides]
        return rng.choice(others or list(self.words))


@dataclass(frozen=True)
class Domain:
    """Things, and what can be done with every one of them."""

    name: str
    things: tuple[Meaning, ...]
    deeds: tuple[Meaning, ...]


def meanings(text: str) -> tuple[Meaning, ...]:
    """Meanings that a text lists, each known by its first word."""
    rows = [[word.strip() for word in part.split("|")] for part in text.split(";") if part.strip()]
    return tuple(Meaning(row[0], tuple(row)) for row in rows)


COMMON = """
buy|purchase|acquire; sell|offer ~ for sale|part with; choose|select|pick; find|locate|track down;
look after|take care of|tend; describe|explain|portray; lose|misplace
"""

DOMAINS = (
    Domain(
        "vehicles",
        meanings(
            """
car|automobile|motorcar; bike|bicycle|cycle; truck|lorry; motorbike|motorcycle; boat|ship|vessel;
plane|airplane|aircraft; van|minibus; train|railway engine|locomotive; tractor|farm machine; scooter|moped;
trailer|caravan
"""
        ),
        meanings(
            COMMON
            + """;
repair|fix|mend; drive|steer|operate; wash|clean|scrub; rent|hire|lease; insure|get coverage for;
park|leave ~ standing; tow|pull|drag; refuel|fill up|top up; paint|spray|recolor; inspect|check|examine
"""
        ),
    ),
    Domain(
        "machines",
        meanings(
            """
computer|pc|desktop machine; laptop|notebook computer; phone|telephone|mobile|handset; printer|printing device;
fridge|refrigerator|icebox; oven|stove|cooker; television|tv set|telly; washing machine|washer; lamp|light|lantern;
heater|radiator|furnace; camera|photo apparatus; clock|watch|timepiece; pump|water pump; vacuum cleaner|hoover;
fan|ventilator; radio|receiver; screen|monitor|display; keyboard|typing board; battery|power cell; engine|motor
"""
        ),
        meanings(
            COMMON
            + """;
repair|fix|mend; install|set up|mount; start|switch on|turn on; stop|switch off|shut down;
replace|exchange|swap out; clean|wipe|dust; connect|hook up|attach; recharge|power up; reset|restore ~ to defaults;
inspect|check|examine; dispose of|throw ~ away|discard
"""
        ),
    ),
    Domain(
        "files",
        meanings(
            """
file|document; picture|photo|image; movie|film|video; song|music track|tune; password|passcode|secret word;
account|user profile; message|email|mail; letter|written note; report|paper|write up; contract|agreement;
invoice|bill; ticket|pass|voucher; program|software|application; website|web page|internet site; table|spreadsheet;
backup|safety copy; database|data store; form|questionnaire
"""
        ),
        meanings(
            COMMON
            + """;
delete|erase|remove; copy|duplicate|clone; share|pass on|hand round; send|mail|transmit; save|store|keep;
open|view|display; edit|change|modify; create|make|produce; print|put ~ on paper;
encrypt|scramble|lock ~ with a key; recover|restore|bring back; download|fetch|retrieve; sign|put your name under;
translate|render ~ in another language
"""
        ),
    ),
    Domain(
        "food",
        meanings(
            """
bread|loaf; cake|sponge|gateau; soup|broth; meat|beef; fish|salmon|trout; potatoes|spuds; noodles|pasta|spaghetti;
sweets|candy|confectionery; biscuits|cookies; salad|greens; porridge|oatmeal; eggs|omelette; cheese|cheddar;
fruit|berries; lemonade|soft drink|soda; coffee|espresso; jam|marmalade; pancakes|crepes
"""
        ),
        meanings(
            COMMON
            + """;
cook|prepare|make; bake|put ~ in the oven; freeze|put ~ on ice; serve|dish up; taste|sample|try;
season|add spices to; slice|cut up|chop; order|ask for; warm up|heat|reheat; keep ~ fresh|preserve
"""
        ),
    ),
    Domain(
        "homes",
        meanings(
            """
house|home|dwelling; flat|apartment; kitchen|cooking area; bathroom|washroom; bedroom|sleeping chamber;
cellar|basement; roof|rooftop; floor|ground boards; wall|partition; garage|carport; balcony|terrace;
shed|garden hut; couch|sofa|settee; wardrobe|closet; rug|carpet; curtain|drape; window|pane; tap|faucet;
pipe|water line; fence|railing
"""
        ),
        meanings(
            COMMON
            + """;
repair|fix|mend; paint|redecorate; clean|tidy|scrub; build|construct|erect; insulate|keep the heat in;
measure|take the size of; rent|lease; furnish|fit out; renovate|modernize|refurbish; tear down|demolish|knock down;
lock|secure
"""
        ),
    ),
    Domain(
        "living things",
        meanings(
            """
dog|hound; cat|kitty; rabbit|bunny; horse|pony; hen|chicken; cow|cattle; sheep|lamb; pig|hog; parrot|talking bird;
goldfish|aquarium fish; turtle|tortoise; mouse|rodent; hamster|small pet; donkey|mule
"""
        ),
        meanings(
            COMMON
            + """;
feed|give food to|nourish; train|teach|educate; wash|bathe; vaccinate|give a shot to|immunize; adopt|take in;
breed|raise|rear; calm|soothe|quieten; carry|transport; weigh|put ~ on the scales; heal|cure|treat
"""
        ),
    ),
    Domain(
        "plants",
        meanings(
            """
tree|oak; rose|flower|blossom; lawn|grass; tomatoes|vegetables; herbs|basil|parsley; hedge|bushes|shrubs;
seeds|grains; apples|orchard fruit; vine|grapes; cactus|desert plant; houseplant|potted plant; wheat|corn|cereal
"""
        ),
        meanings(
            COMMON
            + """;
plant|put ~ into the ground; water|irrigate|sprinkle; cut|trim|prune; grow|cultivate; harvest|reap|gather;
fertilize|enrich ~ with manure; protect|shield|guard; move|transplant|relocate; dry|dehydrate;
get rid of|remove|clear away
"""
        ),
    ),
    Domain(
        "clothes",
        meanings(
            """
coat|jacket; trousers|pants; shirt|blouse; sweater|pullover|jumper; shoes|footwear|boots; hat|cap; dress|gown;
scarf|shawl; bag|purse|handbag; glasses|spectacles; ring|jewelry; umbrella|rain shade; swimsuit|bathing suit;
gloves|mittens
"""
        ),
        meanings(
            COMMON
            + """;
wash|launder; iron|press; mend|repair|sew; dye|color; wear|put on; return|give back|send back; knit|make ~ by hand;
fold|put away; donate|give ~ to charity; try on|check the fit of
"""
        ),
    ),
    Domain(
        "money",
        meanings(
            """
loan|credit; mortgage|home loan; salary|wage|pay; pension|retirement income; insurance|coverage; tax|duty;
savings|nest egg; shares|stocks; invoice|bill; rent|housing cost; budget|spending plan;
bank account|checking account; fine|penalty; refund|money back; fee|charge
"""
        ),
        meanings(
            """
pay|settle|cover; reduce|lower|cut; raise|increase|put up; compare|weigh ~ against others;
calculate|work out|compute; apply for|request|ask for; cancel|terminate|call off; claim|demand|lay claim to;
plan|arrange|organize; dispute|contest|object to; explain|describe; check|verify
"""
        ),
    ),
    Domain(
        "travel",
        meanings(
            """
trip|journey|voyage; holiday|vacation; hotel|inn|guest house; flight|air passage; hike|long walk;
tour|sightseeing round; suitcase|luggage|baggage; passport|travel papers; visa|entry permit; beach|seashore|coast;
museum|exhibition; restaurant|eating place|diner; campsite|tent ground; mountain|peak|summit; island|isle
"""
        ),
        meanings(
            """
plan|arrange|prepare; book|reserve; cancel|call off; postpone|delay|put off; recommend|suggest|advise;
visit|go and see; pay for|settle the cost of; find|locate|track down; describe|explain|portray; enjoy|have fun with;
leave|depart from; reach|get to|arrive at
"""
        ),
    ),
    Domain(
        "health",
        meanings(
            """
cold|runny nose|sniffles; fever|high temperature; headache|migraine; stomach ache|belly pain; cough|sore throat;
burn|scald; wound|cut|injury; allergy|hay fever; sleeplessness|insomnia; stress|nervous tension;
backache|pain in the spine; toothache|dental pain; rash|skin irritation; broken leg|fractured limb;
tiredness|fatigue|exhaustion
"""
        ),
        meanings(
            """
treat|cure|heal; prevent|avoid|ward off; recognize|detect|spot; ease|relieve|soothe; explain|describe;
suffer from|be troubled by; report|tell the doctor about; ignore|pay no attention to; recover from|get over;
measure|assess
"""
        ),
    ),
    Domain(
        "work",
        meanings(
            """
job|position|post; meeting|conference|get together; project|undertaking; team|crew|group; boss|manager|chief;
office|workplace; worker|employee|staff member; customer|client|buyer; company|firm|business; training|course|class;
exam|test; speech|talk|lecture; goal|target|aim; deadline|due date; mistake|error|fault; shop|store; factory|plant
"""
        ),
        meanings(
            """
begin|start|kick off; finish|end|complete; lead|manage|run; join|take part in|enter; leave|quit|give up;
plan|arrange|prepare; improve|make ~ better|enhance; discuss|talk about|debate; judge|evaluate|rate;
praise|commend|speak well of; cancel|call off; postpone|delay|put off; find|locate|look for
"""
        ),
    ),
    Domain(
        "places",
        meanings(
            """
street|road|lane; bridge|viaduct; school|academy; hospital|clinic; church|chapel; library|reading room;
park|public garden; town|city|municipality; village|hamlet; river|stream; lake|pond; forest|woods|woodland;
airport|airfield; station|train stop; market|bazaar; theater|playhouse; prison|jail; harbor|port|dock
"""
        ),
        meanings(
            """
build|construct|erect; close|shut; open|inaugurate; visit|go and see; find|locate|track down;
photograph|take pictures of; leave|depart from; protect|guard|preserve; paint|draw|sketch;
cross|get across|traverse; expand|enlarge|extend; destroy|wreck|ruin; describe|explain|portray
"""
        ),
    ),
)

PEOPLE = meanings(
    """
doctor|physician; teacher|instructor; child|kid|youngster; woman|lady; man|gentleman|fellow;
policeman|police officer|constable; lawyer|attorney; farmer|grower; actor|performer; author|writer; cook|chef;
soldier|trooper; student|pupil|learner; neighbor|person next door; thief|robber|burglar; sailor|seaman;
king|monarch|ruler; friend|buddy|pal; pilot|aviator; tailor|dressmaker; butcher|meat seller; salesman|vendor|dealer;
scientist|researcher; boss|manager; nurse|caregiver; plumber|pipe fitter; gardener|landscaper; painter|artist;
musician|player in a band; grandmother|granny; baby|infant|newborn; tourist|traveler|holidaymaker
"""
)
QUALITIES = meanings(
    """
big|large|huge; small|little|tiny; old|ancient|aged; new|recent|brand new; fast|quick|rapid; slow|sluggish;
cheap|inexpensive|affordable; expensive|costly|pricey; broken|defective|damaged; beautiful|lovely|pretty;
ugly|hideous|unsightly; dirty|filthy|muddy; wet|soaked|damp; heavy|weighty; strange|odd|weird;
famous|well known|celebrated; quiet|silent|noiseless; loud|noisy; dangerous|risky|hazardous; easy|simple;
difficult|hard|tricky; strong|sturdy|robust; empty|vacant; rare|uncommon|scarce; modern|up to date
"""
)
MOODS = meanings(
    """
happy|glad|cheerful; sad|unhappy|gloomy; angry|furious|mad; tired|weary|exhausted; afraid|scared|frightened;
clever|smart|intelligent; rich|wealthy; poor|penniless; brave|courageous; young|youthful; lazy|idle;
polite|courteous
"""
)
SCENES = meanings(
    """
at the shop|in the store; in the street|on the road; at home|in the house; in the forest|in the woods;
at the coast|by the sea|at the beach; in the village|in the hamlet; in the town center|downtown;
at school|in the classroom; at work|in the office; abroad|in a foreign country; on the farm|on the land;
in the mountains|in the hills
"""
)
TIMES = meanings(
    """
in the morning|at dawn; in the evening|at dusk|after sunset; at night|after dark; in autumn|in fall;
during the holidays|in the vacation; every day|daily; every week|weekly; every year|annually;
last year|twelve months ago; soon|shortly|before long; at noon|at midday; often|frequently
"""
)
