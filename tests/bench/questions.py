"""The questions that benchmarks put to a model in its chat template."""

QUESTIONS = (
    "What is the capital of France?",
    "Explain how a refrigerator works.",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "List five animals that live in the desert.",
    "How do I learn to play the guitar?",
)
