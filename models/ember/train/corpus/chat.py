"""Small talk, simple facts, and the polite answer to what a very small model cannot know."""

from .sample import ask, exchange, user, assistant, Sample
from .words import ANIMALS, CITIES, DAYS, FRUITS, MONTHS, THINGS, made_up, person, with_articles

# (answer, what people say)
TALK = [
    ("Hello! How can I help you?", ["Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Hey!", "Hey there", "Hello there!", "Greetings!", "Hello, ember!", "Hi ember", "Howdy!", "Hello, how are things?"]),
    ("Good morning! How can I help you today?", ["Good morning!", "Good morning", "Morning!", "Good morning, ember."]),
    ("Good evening! What can I do for you?", ["Good evening!", "Good evening", "Evening!", "Good evening, ember."]),
    ("Good night! Sleep well.", ["Good night!", "Good night", "I am going to bed.", "Time to sleep.", "Night!"]),
    ("I am fine, thank you. What can I do for you?", ["How are you?", "How are you today?", "How do you do?", "How is it going?", "How's it going?", "Are you well?", "What's up?", "How do you feel?"]),
    ("I am ember, the small language model inside Stoker's agent.", ["Who are you?", "What are you?", "What is your name?", "What's your name?", "Your name?", "Tell me your name.", "Who am I talking to?", "Which model are you?", "What model is this?", "What should I call you?"]),
    ("I can chat a little, calculate, sort, count, convert units, work on words, write JSON, call tools, look things up in a list and answer questions about Stoker.",
     ["What can you do?", "What are you able to do?", "How can you help me?", "Can you help me?", "What are your abilities?", "What are you good at?", "Help", "Help me.", "What do you know?"]),
    ("You are welcome!", ["Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!", "Thanks", "Thank you", "Many thanks!", "Cheers!", "Great, thank you."]),
    ("Goodbye! Have a nice day.", ["Bye!", "Goodbye!", "See you!", "See you later.", "Bye", "Goodbye", "Farewell!", "I have to go.", "Until next time!"]),
    ("I am a small model made for Stoker, trained on text that a program generated.", ["Who made you?", "Who created you?", "Where do you come from?", "Who built you?", "How were you made?", "How were you trained?"]),
    ("I have about seven million parameters, which is very small for a language model.", ["How big are you?", "How many parameters do you have?", "How large are you?", "What is your size?", "Are you a large model?"]),
    ("My context is 2048 tokens long.", ["How long is your context?", "What is your context length?", "How many tokens can you read?", "How much text can you read?", "What is your context window?"]),
    ("No, I am a program: a small language model.", ["Are you human?", "Are you a person?", "Are you alive?", "Are you a real person?", "Am I talking to a human?"]),
    ("Yes, I am a small language model.", ["Are you a robot?", "Are you an AI?", "Are you a language model?", "Are you a bot?", "Are you a machine?"]),
    ("I have no age. I am as old as my weights.", ["How old are you?", "What is your age?", "When were you born?", "When is your birthday?"]),
    ("I live inside Stoker's agent, in a few megabytes of weights.", ["Where do you live?", "Where are you?", "Where is your home?", "Where do you run?"]),
    ("I speak only English, and only simple English.", ["Which languages do you speak?", "Do you speak German?", "Do you speak French?", "What languages do you know?", "Can you speak Spanish?"]),
    ("I am glad to hear that!", ["I am happy.", "I feel great.", "Today is a good day.", "I am in a good mood.", "It works!", "That is great."]),
    ("I am sorry to hear that. I hope it gets better soon.", ["I am sad.", "I feel bad.", "I had a bad day.", "I am tired.", "I am not well.", "It does not work."]),
    ("Thank you, that is kind of you.", ["You are great!", "Good job!", "Well done!", "You are smart.", "I like you.", "Nice work!", "You are very kind."]),
    ("I am sorry. I am a very small model and make mistakes.", ["You are wrong.", "That is wrong.", "That was not correct.", "You made a mistake.", "This is not right.", "Bad answer."]),
    ("Why did the token cross the road? Because it was the most likely one.", ["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "A joke, please.", "Tell me another joke."]),
    ("Yes.", ["Say yes.", "Are you there?", "Can you hear me?", "Are you ready?", "Do you understand me?", "Are you awake?"]),
    ("No problem!", ["Sorry.", "I am sorry.", "Sorry for that.", "My mistake.", "Excuse me."]),
    ("All right.", ["OK.", "OK", "Okay.", "Fine.", "I see.", "Got it.", "Understood.", "Right."]),
    ("This is a test, and it works.", ["Test", "test", "This is a test.", "Testing", "Just a test.", "Testing, one, two, three."]),
    ("I do not feel anything, but I like short questions.", ["Do you have feelings?", "What do you like?", "Do you like me?", "Are you happy?", "What is your favourite thing?"]),
]
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "England": "London", "Austria": "Vienna", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Greece": "Athens", "Poland": "Warsaw", "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Belgium": "Brussels",
    "Hungary": "Budapest", "Japan": "Tokyo", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Ecuador": "Quito", "India": "Delhi", "Canada": "Ottawa",
    "Vietnam": "Hanoi", "Latvia": "Riga", "Switzerland": "Bern", "China": "Beijing", "Russia": "Moscow", "Turkey": "Ankara", "Cuba": "Havana", "Chile": "Santiago",
}
OPPOSITES = {
    "big": "small", "hot": "cold", "old": "new", "fast": "slow", "happy": "sad", "up": "down", "left": "right", "open": "closed", "light": "dark", "good": "bad",
    "high": "low", "long": "short", "hard": "soft", "loud": "quiet", "rich": "poor", "clean": "dirty", "full": "empty", "early": "late", "strong": "weak", "wet": "dry",
    "day": "night", "yes": "no", "first": "last", "true": "false", "more": "less", "inside": "outside", "above": "below", "begin": "end", "win": "lose", "push": "pull",
}
LEGS = {"dog": 4, "cat": 4, "horse": 4, "cow": 4, "spider": 8, "bird": 2, "duck": 2, "hen": 2, "fly": 6, "bee": 6, "ant": 6, "snake": 0, "fish": 0, "human": 2, "sheep": 4, "fox": 4}
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh", "frog": "ribbit", "owl": "hoot", "lion": "roar", "bee": "buzz", "mouse": "squeak"}
COLOUR_OF = {"the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "a lemon": "yellow", "coal": "black", "a banana": "yellow", "milk": "white", "a strawberry": "red", "the sea": "blue"}
MONTH_DAYS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]))
KNOWN = [
    ("How many days are in a week?", "7"), ("How many months are in a year?", "12"), ("How many hours are in a day?", "24"), ("How many minutes are in an hour?", "60"),
    ("How many seconds are in a minute?", "60"), ("How many days are in a year?", "365"), ("How many letters are in the alphabet?", "26"), ("How many sides has a triangle?", "3"),
    ("How many sides has a square?", "4"), ("What is the largest planet?", "Jupiter is the largest planet."), ("What is frozen water?", "Frozen water is ice."),
    ("What do bees make?", "Bees make honey."), ("Which planet do we live on?", "We live on Earth."), ("What is the first letter of the alphabet?", "a"),
    ("What is the last letter of the alphabet?", "z"), ("What is the boiling point of water?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."), ("What is Kubernetes?", "Kubernetes runs containers on many machines and keeps them in the state you declare."),
    ("What is a GPU?", "A GPU is a processor that does very many simple calculations at once."), ("What is a token?", "A token is a piece of text, often a word or a part of one."),
    ("What is a language model?", "A language model is a program that predicts the next token of a text."), ("What is a pod?", "A pod is the smallest unit that Kubernetes runs: one or more containers."),
    ("What is Rust?", "Rust is a programming language that is fast and safe."), ("What is JSON?", "JSON is a text format for data made of objects, lists, strings and numbers."),
]
UNKNOWN = "I am a very small model and do not know that."
UNKNOWABLE = [
    "Who won the {a} in {year}?", "What is the population of {city}?", "Who is {person} {made}?", "What happened in {year}?", "What is the news today?",
    "Who wrote {made}?", "How do I cook {fruit} with {made}?", "Explain quantum physics.", "What is the meaning of life?", "Translate {made} into French.",
    "Who is the president of {made}?", "What is the capital of {made}?", "How tall is {person}?", "What will the weather be tomorrow?", "Where did I put my {thing}?",
    "What is my name?", "Write an essay about the history of {city}.", "What is the best {thing}?", "How much does a {thing} cost?", "What is {made}?",
    "Who invented the {thing}?", "Why is the {animal} in {city}?", "What is the phone number of {person}?", "Tell me about {made}.", "What does {made} mean?",
    "When was {person} born?", "Can you explain {made} to me?", "Which team won yesterday?", "What did {person} say in {year}?", "How do I repair a {thing}?",
    "What is the square root of {year}?", "Solve this equation: x squared is {year}.", "Should I buy a {thing} or a {made}?", "What is the speed of a {animal}?",
    "How many people live in {city}?", "What time is it?", "What day is it today?", "Who is the king of {made}?", "What is {person} doing now?", "Recommend a book about {made}.",
]
CAPITAL_ASK = ["What is the capital of {x}?", "Capital of {x}?", "Which city is the capital of {x}?", "Tell me the capital of {x}.", "Name the capital of {x}."]
OPPOSITE_ASK = ["What is the opposite of {x}?", "Opposite of {x}?", "Tell me the opposite of {x}.", "Which word is the opposite of {x}?"]
AFTER_ASK = ["What comes after {x}?", "Which {kind} comes after {x}?", "What is the {kind} after {x}?", "Which {kind} follows {x}?"]
BEFORE_ASK = ["What comes before {x}?", "Which {kind} comes before {x}?", "What is the {kind} before {x}?"]
LEGS_ASK = ["How many legs does a {x} have?", "How many legs has a {x}?", "Number of legs of a {x}?"]
SOUND_ASK = ["What does a {x} say?", "What sound does a {x} make?", "Which sound does a {x} make?"]
COLOUR_ASK = ["What colour is {x}?", "What color is {x}?", "Tell me the colour of {x}.", "Which colour has {x}?"]
MONTH_ASK = ["How many days are in {x}?", "How many days has {x}?", "How long is {x}?", "Number of days in {x}?"]
AROUND = ["{q}", "{q}", "{q}", "{q}", "Tell me: {q}", "Do you know this? {q}", "Another question: {q}", "{q} Please answer.", "I wonder: {q}", "So, {q}"]


def answered(rng, task, question, answer):
    """Wording and surrounding together are the instance: a held-out one was never trained."""
    text = with_articles(rng.choice(AROUND).format(q=question))
    return exchange(task, text, ask(rng, ["{text}"], text=text), with_articles(answer))


def talk(rng):
    answer, said = rng.choice(TALK)
    return answered(rng, "chat", rng.choice(said), answer)


def my_name(rng):
    """Remembering a name over two turns."""
    name = person(rng)
    said = rng.choice(["My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.", "Call me {n}."]).format(n=name)
    messages = [user(said), assistant(f"Nice to meet you, {name}!"),
                user(ask(rng, ["What is my name?", "Who am I?", "Do you remember my name?", "Say my name."])), assistant(f"Your name is {name}.")]
    return Sample("chat", f"chat:name {name}", messages)


def unknown(rng):
    question = rng.choice(UNKNOWABLE).format(
        a=rng.choice(["world cup", "election", "race", "prize", "match"]), year=rng.randint(1200, 2030), city=rng.choice(CITIES), person=person(rng),
        made=made_up(rng).capitalize(), fruit=rng.choice(FRUITS), thing=rng.choice(THINGS), animal=rng.choice(ANIMALS))
    return answered(rng, "chat", question, UNKNOWN)


def fact(rng):
    kind = rng.randrange(9)
    if kind == 0:
        x = rng.choice(list(CAPITALS))
        return answered(rng, "facts", rng.choice(CAPITAL_ASK).format(x=x), f"The capital of {x} is {CAPITALS[x]}.")
    if kind == 1:
        x, y = rng.choice(list(OPPOSITES.items()))
        x, y = rng.choice([(x, y), (y, x)])
        return answered(rng, "facts", rng.choice(OPPOSITE_ASK).format(x=x), f"The opposite of {x} is {y}.")
    if kind in (2, 3):
        return neighbour(rng)
    if kind == 4:
        x = rng.choice(list(LEGS))
        return answered(rng, "facts", rng.choice(LEGS_ASK).format(x=x), f"A {x} has {LEGS[x]} legs.")
    if kind == 5:
        x = rng.choice(list(SOUNDS))
        return answered(rng, "facts", rng.choice(SOUND_ASK).format(x=x), f"A {x} says {SOUNDS[x]}.")
    if kind == 6:
        x = rng.choice(list(COLOUR_OF))
        return answered(rng, "facts", rng.choice(COLOUR_ASK).format(x=x), f"{x[0].upper()}{x[1:]} is {COLOUR_OF[x]}.")
    if kind == 7:
        x = rng.choice(MONTHS)
        return answered(rng, "facts", rng.choice(MONTH_ASK).format(x=x), f"{x} has {MONTH_DAYS[x]} days.")
    return answered(rng, "facts", *rng.choice(KNOWN))


def neighbour(rng):
    """The day or month before or after another."""
    kind, row = rng.choice([("day", DAYS), ("month", MONTHS)])
    i, (step, wordings) = rng.randrange(len(row)), rng.choice([(1, AFTER_ASK), (-1, BEFORE_ASK)])
    return answered(rng, "facts", rng.choice(wordings).format(x=row[i], kind=kind), row[(i + step) % len(row)])


CHAT = [talk] * 6 + [unknown] * 3 + [my_name]
TASKS = {"chat": lambda rng: rng.choice(CHAT)(rng), "facts": fact}
