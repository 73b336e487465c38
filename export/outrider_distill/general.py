"""General prompts for who gives none: many topics, asked about in many forms.

What a small model makes up itself is odd and alike, so that half of the prompts come from here, or from the user.
"""

import random

from outrider_distill.prompts import DistillPrompt

_NUM = 2600
_TOPICS = """
volcanoes;the French Revolution;photosynthesis;electric cars;chess;sleep;the Roman Empire;black holes;vaccines;
inflation;bread baking;the stock market;coral reefs;solar panels;public speaking;meditation;the Silk Road;penguins;
climate change;bicycles;coffee;jazz music;impressionist painting;the human heart;databases;encryption;
machine learning;gardening;marathon training;the moon landing;earthquakes;tea ceremonies;Renaissance art;
the water cycle;antibiotics;genetics;renewable energy;job interviews;budgeting;house plants;remote teams;time zones;
the printing press;whales;bees;forests;rivers;deserts;glaciers;typography;photography;film noir;opera;basketball;
football;tennis;swimming;yoga;nutrition;vitamins;cholesterol;allergies;migraine;first aid;airports;trains;bridges;
skyscrapers;castles;pyramids;the Vikings;the Aztecs;the Ottoman Empire;Ancient Greece;the Cold War;the United Nations;
democracy;constitutional law;contracts;copyright;patents;taxes;mortgages;insurance;pensions;startups;marketing;
customer service;negotiation;leadership;project management;agile teams;unit testing;version control;operating systems;
compilers;HTTP;DNS;cloud computing;microservices;caching;sorting algorithms;hash tables;recursion;regular expressions;
SQL joins;web accessibility;user interfaces;robots;drones;3D printing;quantum mechanics;relativity;thermodynamics;
magnetism;chemical bonds;the periodic table;acids and bases;evolution;dinosaurs;the immune system;the brain;memory;
learning languages;children's books;poetry;short stories;Shakespeare;mythology;world religions;philosophy of mind;
ethics;logic;statistics;probability;calculus;geometry;prime numbers;maps;navigation;sailing;camping;hiking;
cooking rice;making soup;cheese;chocolate;wine;spices;recycling;composting;air pollution;drinking water;traffic;
urban planning;housing;education;exams;studying;friendship;parenting;pets;dogs;cats;horses;birds;fishing;farming;
weather forecasts;hurricanes;satellites;Mars;comets;telescopes;clocks;calendars;money;banks;cryptocurrency;
video games;board games;puzzles;magic tricks;dance;theatre;museums;architecture;fashion;perfume;jewelry
"""
_FORMS = """
Can you explain {topic} to a beginner?
What are the most important facts about {topic}?
How did {topic} change the way people live?
Write a short story that involves {topic}.
Give me five tips about {topic}.
Write an email to a colleague about {topic}, politely and in under 120 words.
What are the advantages and disadvantages of {topic}?
Compare {topic} with {other}. What do they have in common?
Describe common misconceptions about {topic}.
Make a list of ten questions that a student may ask about {topic}, with one-line answers.
Write a blog post introduction about {topic}.
Summarize what is known about {topic} in one paragraph.
Why is {topic} important?
Suggest a week's plan for somebody who wants to learn about {topic}.
Write a poem about {topic}.
Explain {topic} as if I were ten years old, then as if I were an expert.
What is the history of {topic}?
Who was the most influential person in the history of {topic}, and why?
When and where did {topic} begin?
Rewrite this sentence in a formal tone: "Honestly, {topic} is kind of a big deal these days."
Write a dialogue between two friends who disagree about {topic}.
What should I know before I spend money on {topic}?
Write a product description for a book about {topic}.
Create a quiz of three multiple-choice questions about {topic} and give the answers.
Write a Python function that helps with {topic}, and explain it.
What problems may come up with {topic}, and how are they solved?
Draft an outline of a talk on {topic}.
Give three examples of {topic} from everyday life.
What would happen if {topic} did not exist?
Translate into plain English: the essential principles of {topic} in technical terms.
Which countries are best known for {topic}?
Identify the key terms around {topic} and define each in one sentence.
"""


def general_prompts() -> list[DistillPrompt]:
    """All of them, the same each time."""
    generator = random.Random(1)  # noqa: S311 - no secrets
    topics, forms = _TOPICS.replace("\n", "").split(";"), _FORMS.strip().split("\n")
    prompts = dict[str, None]()
    while len(prompts) < _NUM:
        topic, other = generator.sample(topics, 2)
        prompts[generator.choice(forms).format(topic=topic, other=other)] = None
    return [DistillPrompt(each) for each in prompts]
