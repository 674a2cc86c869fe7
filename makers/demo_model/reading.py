"""Questions answered by copying from a passage, in the framings that applications and RAG libraries use."""

from __future__ import annotations

from makers.demo_model import facts as f
from makers.demo_model import words as lists
from makers.demo_model.dialogue import UNKNOWN, Conversation, Expected, Message, assistant, system, user
from makers.demo_model.entities import ENTITIES
from makers.demo_model.words import Words

RULES = (
    "Be concise.",
    "Today is {date}.",
    "If you do not know something, say so.",
    "Keep your answers short and clear.",
    "Never make up facts.",
    "The user is called {name}.",
    "Answer in English.",
    "Think before you answer.",
    "You work for {brand}.",
    "Do not repeat the question.",
    "Always be polite.",
    "Be precise with names and numbers.",
    "The current time is {clock}.",
    "Your answers are read by experts.",
    "Help the user as well as you can.",
)
HELPERS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions.",
    "You are an assistant for question-answering tasks.",
    "Answer the user's questions.",
    "You answer questions about a text.",
    "Be helpful.",
)
PLAIN = (
    "{c}\n\n{q}",
    "{c}\n{q}",
    "{c} {q}",
    "Context: {c}\n\nQuestion: {q}",
    "Context: {c}\nQuestion: {q}\nAnswer:",
    "Passage: {c}\n\nQuestion: {q}",
    "Read this text:\n\n{c}\n\n{q}",
    "Text: {c}\nQuestion: {q}",
    "Question: {q}\n\nContext: {c}",
    "Question: {q}\nContext:\n{c}\nAnswer:",
    "Here is a text.\n{c}\nAnswer this question: {q}",
    "Use the following text to answer.\n\n{c}\n\n{q}",
)
RAG = (
    "Context information is below.\n---------------------\n{c}\n---------------------\nGiven the context information "
    "and not prior knowledge, answer the query.\nQuery: {q}\nAnswer: ",
    "Answer the question based only on the following context:\n{c}\n\nQuestion: {q}\n",
    "Answer the question based only on the following context:\n\n{c}\n\nQuestion: {q}",
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {q} \nContext: {c} \nAnswer:",
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n{c}\n\nQuestion: {q}\nHelpful Answer:",
    "Context:\n{c}\n\nQuestion: {q}\n\nAnswer using only the context.",
    "Given the following documents, answer the question.\n\nDocuments:\n{c}\n\nQuestion: {q}\nAnswer:",
)
RAG_SYSTEMS = (
    "You are an expert Q&A system that is trusted around the world.\nAlways answer the query using the provided "
    "context information, and not prior knowledge.\nSome rules to follow:\n1. Never directly reference the given "
    "context in your answer.\n2. Avoid statements like 'Based on the context, ...' or 'The context information ...' "
    "or anything along those lines.",
    "You are a helpful assistant. Answer using only the context.",
    "You answer questions from documents.",
)
REFINE = (
    "The original query is as follows: {q}\nWe have provided an existing answer: {a}\nWe have the opportunity to "
    "refine the existing answer (only if needed) with some more context below.\n------------\n{c}\n------------\n"
    "Given the new context, refine the original answer to better answer the query. If the context isn't useful, "
    "return the original answer.\nRefined Answer: "
)
STANDALONE = (
    "Given a conversation (between Human and Assistant) and a follow up message from Human, rewrite the message to "
    "be a standalone question that captures all relevant context from the conversation.\n\n<Chat History>\n{h}\n\n"
    "<Follow Up Message>\n{q}\n\n<Standalone question>\n",
    "Given the chat history and the latest user question, rewrite it as a standalone question. Do not answer it."
    "\n\n{h}\n\nQuestion: {q}",
)
SYSTEM_CONTEXT = (
    "Use the given context to answer the question.\nContext: {c}",
    "You are a helpful assistant. Here is what you know:\n{c}",
    "Answer from this text:\n\n{c}",
    "{c}",
    "You have access to the following context:\n\n{c}",
)
FILLERS = (
    "The weather was {adj} that day.",
    "Many people came to see it.",
    "Nobody knows why.",
    "It was a {adj} year.",
    "The {thing} stood near the {thing}.",
    "This happened a long time ago.",
    "There is more to tell.",
    "Some say that the {thing} is {adj}.",
    "The rest of the story is well known.",
    "A {animal} slept by the {thing}.",
    "Visitors often ask about the {thing}.",
    "This page was updated last week.",
)


def manner(w: Words, text: str) -> str:
    """A system text, sometimes with further rules that change nothing."""
    if not w.chance(0.3):
        return text
    rules = w.rng.sample(RULES, w.rng.randint(1, 4))
    joined = w.pick((" ", "\n", "\n- ")).join([text, *rules])
    for slot, draw in (("{date}", w.date), ("{name}", w.name), ("{brand}", w.brand), ("{clock}", w.clock)):
        if slot in joined:
            joined = joined.replace(slot, draw())
    return joined


def filler(w: Words) -> str:
    """A sentence that answers nothing."""
    text = w.pick(FILLERS)
    for slot, items in (("{adj}", lists.ADJECTIVES), ("{thing}", lists.THINGS), ("{animal}", lists.ANIMALS)):
        while slot in text:
            text = text.replace(slot, w.pick(items), 1)
    return text


def gather(w: Words, count: int) -> list[list[f.Fact]]:
    """About ``count`` facts in groups, one group for each subject; subjects differ."""
    groups: list[list[f.Fact]] = []
    seen: set[str] = set()
    same = w.pick(ENTITIES) if w.chance(0.4) else None
    while count > 0:
        if w.chance(0.3):
            group = [f.generic(w)]
        else:
            group = f.describe(w, same or w.pick(ENTITIES), w.rng.randint(1, min(3, count)))
        if group[0].subject in seen:
            continue
        seen.add(group[0].subject)
        groups.append(group)
        count -= len(group)
    return groups


def write(w: Words, groups: list[list[f.Fact]]) -> list[str]:
    """One paragraph for each group, some with sentences that answer nothing."""
    paragraphs = []
    for group in groups:
        if group[0].entity.kind == "thing":
            fact = group[0]
            text = w.pick(
                (
                    f"The {fact.field.key} of {fact.subject} is {fact.short()}.",
                    f"{f.upper(fact.subject)} has the {fact.field.key} {fact.short()}.",
                    f"{f.upper(fact.subject)}'s {fact.field.key} is {fact.short()}.",
                )
            )
        else:
            text = f.prose(w, group)
        if w.chance(0.15):
            text = w.pick((f"{text} {filler(w)}", f"{filler(w)} {text}"))
        paragraphs.append(text)
    return paragraphs


def reply(fact: f.Fact) -> str:
    """The answer sentence for a fact."""
    if fact.entity.kind == "thing":
        return f"The {fact.field.key} of {fact.subject} is {fact.short()}."
    return f.upper(fact.answer())


def missing(w: Words, groups: list[list[f.Fact]]) -> str:
    """A question that the passage does not answer: another field, or another subject."""
    known = {(fact.subject, fact.field.key) for group in groups for fact in group}
    for _ in range(20):
        group = w.pick(groups)
        entity = group[0].entity if group[0].entity.kind != "thing" else w.pick(ENTITIES)
        subject = group[0].subject if w.chance(0.5) and entity is group[0].entity else None
        fact = f.describe(w, entity, 1, subject)[0]
        if (fact.subject, fact.field.key) not in known:
            break
    return fact.question(w)


def ask(w: Words, groups: list[list[f.Fact]]) -> tuple[str, str, list[str], f.Fact | None]:
    """A question, its answer, the strings that the answer must contain, and the fact asked for."""
    if w.chance(0.2):
        return missing(w, groups), UNKNOWN, [UNKNOWN.rstrip(".")], None
    fact = w.pick(w.pick(groups))
    required = [fact.short()] if not isinstance(fact.value, list) else [str(item) for item in fact.value]
    if fact.field.kind == "boolean":
        required = [f"{fact.short()},"]
    return fact.question(w), reply(fact), required, fact


def passage_qa(w: Words) -> Conversation:
    """One to six facts and one to five questions about them."""
    groups = gather(w, w.rng.randint(6, 25) if w.long else w.rng.randint(1, 6))
    text = w.pick((" ", "\n", "\n\n", " ")).join(write(w, groups))
    brief = w.chance(0.12)
    messages: list[Message] = []
    if brief:
        messages.append(
            system(
                w.pick(
                    (
                        "Answer with only the value.",
                        "Answer briefly, with just the answer.",
                        "Reply with the answer only, no sentence.",
                    )
                )
            )
        )
    elif w.chance(0.35):
        messages.append(system(manner(w, w.phrase(HELPERS))))
    if not brief and w.chance(0.15):
        messages = [system(w.phrase(SYSTEM_CONTEXT).replace("{c}", text))]
        text = ""
    required: list[str] = []
    asked_before: set[str] = set()
    for _ in range(w.rng.randint(1, 4)):
        question, answer, needed, fact = ask(w, groups)
        if answer in asked_before:
            continue
        asked_before.add(answer)
        required = needed
        if brief and fact:
            answer, required = fact.short(), [fact.short()]
        asked = question
        if len(asked_before) == 1 and text:
            asked = w.phrase(PLAIN).replace("{q}", question).replace("{c}", text)
        messages += [user(asked), assistant(answer)]
    return Conversation("passage", messages, Expected("text", required))


def documents(w: Words, groups: list[list[f.Fact]]) -> str:
    """Paragraphs as retrieved chunks, with the metadata or numbering that libraries add."""
    chunks = write(w, groups)
    style = w.rng.randrange(6)
    if style == 0:
        return "\n\n".join(chunks)
    out = []
    for number, chunk in enumerate(chunks, 1):
        path = w.pick(("{}.txt", "data/{}.md", "/home/docs/{}.txt", "{}.pdf")).format(w.word())
        heads = (
            f"file_path: {path}\n\n{chunk}",
            f"[{number}] {chunk}",
            f"Document {number}: {chunk}",
            f"Source: {path}\n{chunk}",
            f"page_label: {number}\nfile_path: {path}\n\n{chunk}",
        )
        out.append(heads[style - 1])
    return "\n\n".join(out)


def refine(w: Words) -> Conversation:
    """LlamaIndex's second step: keep the existing answer, or answer when only the new context can."""
    groups = gather(w, w.rng.randint(1, 4))
    question, answer, required, _ = ask(w, groups)
    existing, text = UNKNOWN, documents(w, groups)
    if w.chance(0.5):
        existing, text = answer, documents(w, gather(w, w.rng.randint(1, 4)))
    asked = REFINE.replace("{q}", question).replace("{a}", existing).replace("{c}", text)
    return Conversation("rag", [user(asked), assistant(answer)], Expected("text", required), None, ["refine"])


def standalone(w: Words) -> Conversation:
    """The follow-up question of a retrieval chat, which here already stands alone."""
    groups = gather(w, w.rng.randint(1, 3))
    turns = [ask(w, groups) for _ in range(w.rng.randint(1, 3))]
    history = "\n".join(f"{w.pick(('user', 'Human'))}: {turn[0]}\nassistant: {turn[1]}" for turn in turns)
    question = w.pick(w.pick(groups)).question(w)
    asked = w.pick(STANDALONE).replace("{h}", history).replace("{q}", question)
    return Conversation("rag", [user(asked), assistant(question)], Expected("exact", question), None, ["standalone"])


def rag_qa(w: Words) -> Conversation:
    """A question over retrieved chunks, in the style of LlamaIndex and LangChain prompts."""
    if w.chance(0.08) and not w.long:
        return refine(w) if w.chance(0.6) else standalone(w)
    groups = gather(w, w.rng.randint(10, 45) if w.long else w.rng.randint(2, 9))
    text = documents(w, groups)
    question, answer, required, _ = ask(w, groups)
    messages = [system(manner(w, w.pick(RAG_SYSTEMS)))] if w.chance(0.6) else []
    if w.chance(0.12):
        messages = [system(w.phrase(SYSTEM_CONTEXT).replace("{c}", text)), user(question)]
    else:
        messages.append(user(w.pick(RAG[:1] * 4 + RAG).replace("{q}", question).replace("{c}", text)))
    messages.append(assistant(answer))
    if w.chance(0.15):
        question, answer, required, _ = ask(w, groups)
        messages += [user(question), assistant(answer)]
    return Conversation("rag", messages, Expected("text", required))
