"""The engine by itself: one answer, a stream, many questions at once, and a deadline.

python examples/plain_async.py
"""

import asyncio

from asyncengine import AsyncEngine, SamplingParams

PASSAGE = "Velmora is a town in Norway. It is led by mayor Ida Lund. Velmora has 8412 inhabitants."
QUESTIONS = ["Who is the mayor of Velmora?", "How many people live in Velmora?", "In which country is Velmora?"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


async def main(model: str = "demo") -> list[str]:
    async with await AsyncEngine.from_pretrained(model) as engine:
        completion = await engine.chat([{"role": "user", "content": "Hello!"}], GREEDY)
        print(f"{completion.text}   ({completion.usage.total_tokens} tokens, {completion.finish_reason})")

        async with engine.stream_chat([{"role": "user", "content": "Count from 1 to 5."}], GREEDY) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()

        # All of these run in one batch; the passage they share is computed once.
        chats = [[{"role": "user", "content": f"{PASSAGE}\n\n{question}"}] for question in QUESTIONS]
        answers = await asyncio.gather(*(engine.chat(chat, GREEDY) for chat in chats))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question}  {answer.text}   ({answer.usage.cached_tokens} prompt tokens from the cache)")

        # Leaving frees the compute: nothing of the abandoned request runs on.
        try:
            async with asyncio.timeout(0.05):
                await engine.generate("A story without end:", SamplingParams(max_tokens=2000, ignore_eos=True))
        except TimeoutError:
            print("left early")
        return [answer.text for answer in answers]


if __name__ == "__main__":
    asyncio.run(main())
