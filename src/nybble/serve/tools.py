"""Tool calls: from what a model writes to OpenAI's `tool_calls`, and the grammar of a call that has to be made.

How a model writes calls is what its chat template taught it: each format is known by a phrase of the template. Text leaves
here only when it can no longer turn out to be a call. A call is one as soon as its name and the brace that opens its arguments
are there; from then on its arguments are what the model writes, letter by letter, valid or cut short: as OpenAI's are.
Sources: the templates of Hermes-2-Pro and Qwen2.5 (`<tool_call>`), Mistral-7B-Instruct-v0.3 (`[TOOL_CALLS]`), Llama-3.1.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from uuid import uuid4

from msgspec.structs import replace

from nybble.engine.messages import JSON_SPACE, Grammar, SamplingParams
from nybble.serve.protocol import NO_ARGUMENTS, ChatRequest, Function, RequestError, Tool
from nybble.serve.stream import overlap
from nybble.text import Tokenizer


@dataclass(frozen=True)
class Format:
    """Calls are `mark first CALL (between CALL)* last`, a call is JSON of a name and, under `key`, an object. An empty mark:
    the whole answer is calls, or none; an empty between: one call at a time. phrase: what a template of this format holds."""

    phrase: str
    mark: str
    first: str
    between: str
    last: str
    key: str


FORMATS = {
    "Hermes and Qwen": Format("<tool_call>", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>",
                              "arguments"),
    "Mistral": Format("[TOOL_CALLS]", "[TOOL_CALLS]", " [", ", ", "]", "arguments"),
    "Llama 3": Format('"parameters": dictionary of argument name and its value', "", "", "", "", "parameters"),
}
OTHERS = ("<function=", "<arg_key>", "[ARGS]")  # of formats that share a phrase with the above
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
# What may stand before, between and after calls; a bracket only where it cannot begin a tag.
AROUND = re.compile(rf"(?:{'|'.join(map(re.escape, TAGS))}|[\s\],;]|\[(?=[^T]))*")
# Calls as templates and models write them: the name before the arguments, which can then leave as they come, or behind them;
# and further texts, such as a type or an id.
FIELDS = r'(?:(?!"name")"\w+"\s*:\s*"[^"\\]*"\s*,\s*)*'
NAME, ARGUMENTS = r'"name"\s*:\s*"([^"\\]+)"', r'"(?:arguments|parameters)"\s*:\s*(?={)'
NAME_FIRST = re.compile(rf"{{\s*{FIELDS}{NAME}\s*,\s*{FIELDS}{ARGUMENTS}")
ARGUMENTS_FIRST, NAME_LAST = re.compile(rf"{{\s*{FIELDS}{ARGUMENTS}"), re.compile(rf"\s*,\s*{FIELDS}{NAME}")
# What a reader of JSON looks for in a string, and outside: there "<" can only begin the tag that follows a call.
IN_STRING, OUTSIDE = re.compile(r'"|\\.', re.DOTALL), re.compile(r'[{}\[\]"<]')
OBJECT = {"type": "object"}  # which parameters need not say


@dataclass(frozen=True)
class Tools:
    """What one request offers, and how this model calls it. forced: names of which one has to be called, if not empty."""

    form: Format
    functions: tuple[Function, ...]
    forced: tuple[str, ...]
    several: bool
    mark_id: int | None  # where the mark is a special token

    def described(self) -> list[dict]:
        """As chat templates take them, which look into every field."""
        return [{"type": "function", "function": {"name": one.name, "description": one.description or "",
                                                  "parameters": one.parameters or NO_ARGUMENTS}} for one in self.functions]

    def applied(self, params: SamplingParams) -> SamplingParams:
        """params of an answer that has to call, or may: if it does not, it keeps to the response_format. Raises RequestError
        (400) when it has to have another form."""
        answer = params.grammar
        if answer is not None and answer.field != "response_format":
            raise RequestError(400, f"{answer.field} with tools: an answer cannot keep to it and call; send response_format "
                               "or tool_choice none, or leave one of them out", param=answer.field)
        shown = self.mark_id is None and params.skip_special_tokens
        grammar = self._grammar(None) if self.forced else answer and self._grammar(json.loads(answer.text))
        try:
            return replace(params, skip_special_tokens=shown, grammar=grammar)
        except ValueError as error:
            raise RequestError(400, f"tool_choice that forces a call, and {error}", param="tool_choice") from None

    def _grammar(self, answer: dict | None) -> Grammar:
        """answer: the JSON schema of an answer that does not call, if one may."""
        form, mark = self.form, f"<[{self.mark_id}]>"

        def in_json(schema: dict) -> str:
            return f"%json {json.dumps({'x-guidance': JSON_SPACE} | schema)}"

        def quoted(text: str) -> str:
            if self.mark_id is None:
                return json.dumps(text) if text else ""
            return f" {mark} ".join(json.dumps(part) if part else "" for part in text.split(form.mark))

        functions = [one for one in self.functions if one.name in self.forced or not self.forced]
        more = f"({quoted(form.between)} call)*" if self.several else ""
        rules = ["start: calls" if answer is None else f"start: calls | {in_json(answer)}",
                 f"calls: {quoted(form.mark + form.first)} call {more} {quoted(form.last)}",
                 "call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
        for i, one in enumerate(functions):
            before = f'{{"name": "{one.name}", "{form.key}": '
            rules += [f'call{i}: {json.dumps(before)} json{i} "}}"',
                      f"json{i}: {in_json((one.parameters or NO_ARGUMENTS) | OBJECT)}"]
        return Grammar("lark", "\n".join(rules), "tools" if answer is None else "response_format")


def tools_of(body: ChatRequest, tokenizer: Tokenizer) -> Tools | None:
    """None when the model is not to call anything. Raises RequestError (400)."""
    choice = body.tool_choice or "auto"
    functions = tuple(tool.function for tool in body.tools or ())
    names = tuple(one.name for one in functions)
    if not names and choice not in ("none", "auto"):
        raise RequestError(400, "tool_choice asks for a call, but there are no tools: send tools", param="tool_choice")
    if len(set(names)) < len(names):
        raise RequestError(400, f"tools: two of them have one name ({', '.join(names)}): rename one", param="tools")
    if not names or choice == "none":
        return None
    for i, one in enumerate(functions):
        if (kind := (one.parameters or OBJECT).get("type", "object")) != "object":
            raise RequestError(400, f"tools[{i}].function.parameters: arguments are an object, this says type {kind!r}: "
                               'send "object"', param=f"tools[{i}].function.parameters")
    if isinstance(choice, Tool) and choice.function.name not in names:
        raise RequestError(400, f"tool_choice: there is no tool {choice.function.name!r} among {', '.join(names)}",
                           param="tool_choice")
    template = tokenizer.templates.get("tool_use") or tokenizer.templates.get("default", "")
    if not re.search(r"\btools\b", template):
        raise RequestError(400, "this model's chat template has no tools: leave tools out, or serve a model made for them",
                           param="tools")
    form = next((one for one in FORMATS.values() if one.phrase in template), None)
    if form is None or any(other in template for other in OTHERS):
        raise RequestError(400, "how this model's chat template has it write calls is not known here (the formats of "
                           f"{', '.join(FORMATS)} are): leave tools out, or send tool_choice none", param="tools")
    forced = (choice.function.name,) if isinstance(choice, Tool) else names if choice == "required" else ()
    several = not isinstance(choice, Tool) and body.parallel_tool_calls is not False and form.between != ""
    return Tools(form, functions, forced, several, tokenizer.special_id(form.mark))


@dataclass
class JsonObject:
    """How far the object that a text begins with was read. inner: where the first object or list in it ends, end: where it
    ends itself; None until then."""

    at: int = 0
    depth: int = 0
    quoted: bool = False
    inner: int | None = None
    end: int | None = None

    def read(self, text: str) -> None:
        while self.end is None and (found := (IN_STRING if self.quoted else OUTSIDE).search(text, self.at)):
            self.at = found.end()
            if found[0] == '"':
                self.quoted = not self.quoted
            elif found[0] == "<":
                self.end = found.start()
            elif found[0] in "{[":
                self.depth += 1
            elif found[0] in "}]":
                self.depth -= 1
                if self.depth == 1 and self.inner is None:
                    self.inner = self.at
                elif self.depth == 0:
                    self.end = self.at


class ToolText:
    """One answer's text in, content and calls out."""

    def __init__(self, form: Format) -> None:
        self._form, self._held, self.count = form, "", 0
        self._inside = self._fresh = not form.mark  # among calls; and none of them has begun yet
        self._object: JsonObject | None = None  # that the held text begins with
        self._before = ""  # what is content with it if it is no call
        self._sent: int | None = None  # how much of it was sent or is no argument, once it is a call

    def push(self, text: str, final: bool = False) -> tuple[str, list[dict]]:
        """Content that is certain now, and what is new of calls, as OpenAI streams them. final: there is no more.

        How a text is cut changes nothing but how many pieces arguments come in; pushed as a whole, each call comes in one.
        """
        self._held += text
        content, calls, mark = "", [], self._form.mark
        while self._held:
            if not self._inside:
                at = self._held.find(mark) if mark else -1
                self._inside = self._fresh = at >= 0
                if at < 0:
                    at = len(self._held) - (overlap(self._held, mark) if mark and not final else 0)
                content, self._held = content + self._held[:at], self._held[at:]
                if not self._inside:
                    break
            if self._object is None:
                start = AROUND.match(self._held).end()
                before, rest = self._held[:start] if self._fresh else "", self._held[start:]
                cut = any(tag.startswith(rest) for tag in TAGS)
                if rest.startswith("{"):
                    self._object, self._before, self._held = JsonObject(), before, rest
                elif final or not cut:  # the beginning of a tag after calls is the end of the last one
                    content, self._held, self._inside = content + before, "" if cut and not self._fresh else rest, False
                    continue
                else:
                    break
            self._object.read(self._held)
            calls += self._of_call()
            end = self._object.end
            if end is None and not final:
                break
            if self._sent is None:
                end = end or 0  # what never ended may hold calls
                content, self._inside = content + self._before + self._held[:end], False
            self._held = "" if end is None else self._held[end:]
            self._object = self._sent = None
        return content, calls

    def _of_call(self) -> list[dict]:
        """What is new of the call that the held text begins with; nothing while it may be none."""
        found, held, begins = self._object, self._held, {}
        if self._sent is None:
            if opening := NAME_FIRST.match(held):
                name = opening[1]
            elif found.inner and (opening := ARGUMENTS_FIRST.match(held)) and (last := NAME_LAST.match(held, found.inner)):
                name = last[1]
            else:
                return []
            self._sent, self._fresh, self.count, begins = opening.end(), False, self.count + 1, {"name": name}
        until = max(self._sent, found.inner or found.end or len(held))
        function, self._sent = begins | {"arguments": held[self._sent : until]}, until
        call = {"index": self.count - 1, "function": function}
        if begins:  # Mistral's templates want ids of nine letters and digits; the others take any
            call |= {"id": uuid4().hex[:9], "type": "function"}
        return [call] if any(function.values()) else []
