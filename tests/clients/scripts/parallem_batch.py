"""parallem: agents whose calls are collected into a batch, and answered when the same program runs again."""

import tempfile
import time
import warnings

import openai
import parallem

warnings.simplefilter("ignore")


def ask_all(directory: str) -> list[str]:
    """Run the agents once: unanswered calls are sent as a batch when the session ends."""
    answers = []
    with parallem.resume_directory(
        directory,
        provider="openai",
        strategy="batch",
        client=openai.OpenAI(max_retries=8),
        llm="m",
        tweaks={"batch_user_confirmation": False},
    ) as session:
        for number in range(6):
            with session.agent(f"agent-{number}") as agent:
                answers.append(agent.ask_llm(f"Say {number}.").final_answer)
    return answers


with tempfile.TemporaryDirectory() as directory:
    answers = ask_all(directory)
    runs = 1
    while len(answers) < 6:
        time.sleep(0.5)
        answers = ask_all(directory)
        runs += 1
assert all(answers), answers
print(f"strategy batch: {len(answers)} agents answered, by running the same program again")
