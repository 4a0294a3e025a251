"""Beginnings of self-written prompts.

{word} is an ordinary word of the model's vocabulary, {name} a first name. The model completes a beginning that ends
in the middle of a sentence, as a user would.
"""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly and to the point.",
    "You are a patient teacher who explains things step by step.",
    "You are an expert programmer. Answer with working code.",
    "You are a friendly chatbot.",
    "Answer in one paragraph.",
)

NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kofi", "Laura", "Maria",
    "Noah", "Olga", "Pedro", "Quinn", "Rosa", "Sam", "Tom", "Uma", "Victor", "Wei", "Yusuf", "Zoe",
)  # fmt: skip

# The model completes these: what an ordinary user asks.
CHAT = (
    "", "", "", "", "", "",
    "How do I ", "How can I ", "What is the best way to ", "What are the main ", "Why do ", "Why is ", "Can you ",
    "Could you ", "Please ", "Write a ", "Write an email to ", "Write a short story about ", "Write a poem about ",
    "Write a blog post about {word}", "Compose a ", "Draft a ", "Explain ", "Explain how {word}", "Explain the ",
    "Describe ", "Compare ", "Discuss ", "Outline ", "Give me ", "List ", "Suggest ", "Imagine you are ",
    "Pretend to be ", "Act as a {word}", "You are a ", "I am a ", "I have ", "I want to ", "My {word} ",
    "In the field of {word}, ", "What would happen if ", "What is the difference between ", "Tell me about ",
    "Help me ", "Create a ", "Design a ", "Rewrite the following ", "Classify the following ", "Is it true that ",
    "Suppose ", "Given the following ", "Analyze ", "Evaluate ", "Provide ", "Identify ", "Develop ", "Plan a ",
    "Edit the following paragraph and correct any grammar errors: ", "Extract ", "Which {word} ", "Should I ",
    "Tell me about {word} and {word}.", "What is {word}?", "Write about {word}, {word} and {word}.",
    "How are {word} and {word} related?", "Give me three ideas about {word}.", "Explain {word} to a child.",
)  # fmt: skip

CODE = (
    "from typing import List\n\n\ndef {word}_{word}(", "from typing import List\n\n\ndef {word}(",
    "\n\ndef {word}_{word}(", "\n\ndef {word}(", "\n\ndef is_{word}(", "\n\ndef count_{word}(",
    "\n\ndef get_{word}(", "\n\ndef find_{word}(", "\ndef {word}_{word}(", "import math\n\n\ndef {word}(",
    "def {word}(s: str) -> str:\n    \"\"\" ", "def {word}(numbers: List[int]) -> int:\n    \"\"\" ",
    "def {word}(lst):\n    \"\"\"", "def {word}(n: int) -> bool:\n    \"\"\" Return ",
    "def {word}(a, b):\n    \"\"\"",
    "def {word}_{word}(text):\n    \"\"\"\n    Given ", "def {word}_{word}(array, k):\n    \"\"\"",
    "from typing import List, Tuple\n\n\ndef {word}_{word}(", "class {word}:\n    def __init__(self",
    "Write a Python function that ", "Write a Python function to {word} ", "Write a function called {word} that ",
    "Write a Python program that ", "Implement ", "Write a C++ program ", "Write a JavaScript function ",
    "Write a simple website in HTML ", "Write an SQL query ", "Write a regular expression ", "Write a Bash script ",
    "Fix the bug in this code:\n\ndef ", "What does this code do?\n\n", "How do I {word} a list in Python?",
    "Complete the following function:\n\ndef {word}(", "Write a unit test for ", "Write a class {word} ",
)  # fmt: skip

MATH = (
    "{name} has ", "{name} buys ", "{name} and {name} ", "{name} is ", "{name} wants to ", "{name} earns ",
    "{name} decides to ", "{name} works ", "{name} needs ", "A {word} costs ", "A store sells ",
    "A train ", "A farmer ",
    "A school ", "A {word} has ", "There are ", "If {name} ", "In a class of ", "Each {word} ", "Two friends ",
    "Every day {name} ", "Last week {name} ", "The price of ", "To make {word}, {name} ", "The sum of ",
    "What is the area of ", "Solve for x: ", "Calculate ", "Find the ", "How many ",
    "Given that x + ", "A rectangle ",
    "What is the probability ", "The {word} of {name} is ", "A box contains ", "At the {word}, {name} ",
)  # fmt: skip

QA = (
    "Who ", "who ", "When ", "when did ", "Where ", "where is ", "What ", "what is the ", "Which ", "How many ",
    "how many ", "who played ", "who wrote ", "who sings ", "What year did ", "when was the ", "Where did ",
    "what does {word} ", "who is the {word} ", "what is {word} ", "where does the {word} ", "Who invented ",
    "What is the capital of ", "what type of {word} ", "when does {word} ", "how long ", "The name of the ",
    "what was the {word} ", "who won the ", "Where was ", "what are the {word} ", "How old ", "who has the most ",
)  # fmt: skip

# Sentences in other languages are continued by the model, then translated.
TRANSLATION_ORDERS = (
    "Translate German to English: ", "Translate {language} to English: ", "Translate from {language} to English:\n",
    "Translate the following {language} sentence to English: ", "What does this mean in English? ",
    "Translate into English:\n\n",
)  # fmt: skip
SENTENCES = {
    "German": (
        "Die ", "Der ", "Das ", "Ein ", "Eine ", "Es ", "Wir ", "Ich ", "Sie ", "Er ", "In ",
        "Im ", "Am ", "Auf ", "Nach ",
        "Für ", "Mit ", "Bei ", "Seit ", "Wenn ", "Als ", "Aber ", "Und ", "Doch ", "Auch ",
        "Viele ", "Die Regierung ",
        "Das Unternehmen ", "Die Stadt ", "Der Präsident ", "Laut ", "Nicht ", "Zwei ",
        "Die Kinder ", "Was ", "Warum ",
        "Heute ", "Gestern ", "Damit ", "Diese ", "Jeder ", "Man ", "Trotz ", "Während ", "Unter ", "Mehr als ",
    ),
    "French": ("Le ", "La ", "Les ", "Un ", "Une ", "Je ", "Nous ", "Il ", "Elle ", "Dans ", "Pour ", "Ce ", "On "),
    "Spanish": ("El ", "La ", "Los ", "Las ", "Un ", "Una ", "En ", "Yo ", "Para ", "Es ", "Por ", "No ", "Me "),
    "Italian": ("Il ", "La ", "I ", "Le ", "Un ", "Una ", "Nel ", "Per ", "Non ", "È ", "Questo "),
    "Portuguese": ("O ", "A ", "Os ", "As ", "Um ", "Uma ", "No ", "Para ", "Não ", "Eu "),
    "Dutch": ("De ", "Het ", "Een ", "Ik ", "We ", "In ", "Op ", "Voor ", "Als "),
}  # fmt: skip

# Complete requests; the answers are used as passages below.
PASSAGES = (
    "Write a news article about {word} and {word}.", "Write a detailed news report about {word} in {word}.",
    "Write a long article about {word}.", "Write an encyclopedia entry about {word}.",
    "Write a newspaper story about a man called {name} and his {word}.",
    "Write a newspaper story about {name}, a woman who {word}.",
    "Write several paragraphs on the history of {word}.",
    "Write a Wikipedia article about {word} and {word}.", "Write a biography of {name} {word}.",
    "Report on an accident with a {word} near {word}.", "Write a sports report about {word} against {word}.",
    "Write a story about {name}, {name} and a {word}.", "Write an essay on {word}.", "Write a review of {word}.",
    "Write a scientific article about {word}.", "Write a police report about {name} and the {word}.",
    "Tell the story of {word} from beginning to end.", "Write an interview with {name} about {word}.",
)  # fmt: skip

# Continued outside any conversation: people seldom paste what an assistant would write.
DOCUMENTS = (
    "Police in ", "A man from ", "A woman who ", "The government has ", "The {word} minister ", "Thousands of ",
    "It was ", "{name} {word} was born in ", "{name} {word}, ", "By {name} {word}\n\n", "{name}, who ",
    "When {name} ", "WASHINGTON -- ", "LONDON -- ", "(News) -- ", "The {word} is a ", "The {word} of {word} ",
    "In 18", "In 19", "In 20", "{word} and {word}\n\n", "A new {word} ", "The company said ", "After {word}, ",
    "Researchers have ", "According to ", "The first {word} ", "Scientists at the University of ", "The team ",
    "On Monday, ", "Last night ", "The history of ", "The film ", "The song ", "The {word} River ",
    "Manchester ", "The court ", "Two men ", "A report by ", "The book ",
)  # fmt: skip

# {text} is one or more passages; the model continues after it.
SUMMARY_ORDERS = (
    "Summarize: {text}", "Summarize: {text}", "Summarise the following text: {text}", "{text}\n\nSummarize this.",
    "Summarize the following article in a few sentences:\n\n{text}", "Give a short summary of this text:\n{text}",
    "{text}\n\nTL;DR", "What are the main points of this text?\n\n{text}",
    "Write a headline for this article:\n\n{text}",
)  # fmt: skip
QUESTION_ORDERS = (
    "{text}\n\nQuestion: ", "{text}\n\nWhat ", "{text}\n\nWho ", "{text}\nwhat ", "{text}\nwho ", "{text}\nwhen ",
    "{text}\nWhere ", "{text}\nhow ", "{text}\n\nAnswer the question from the text above. ", "{text}\nQ: ",
    "Read the context and answer the question.\n\nContext: {text}\n\nQuestion: ",
    "Extract {word} from this text:\n{text}",
    "Answer from the following passages.\n\n{text}\n\n", "{text}\n\nBased on the text, ", "{text}\nwhich ",
)  # fmt: skip

# Beginnings of a user's next message.
FOLLOW_UPS = (
    "", "", "", "Can you ", "Now ", "What about ", "Why ", "How ", "Rewrite ", "Make it ",
    "Explain ", "Give me ", "And ",
    "I don't understand ", "Thanks! ", "Please ", "What if ", "Could you ", "Is it ", "Add ",
    "Translate ", "Summarize ",
)  # fmt: skip
