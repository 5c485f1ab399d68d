"""Parse the control flow of a shell script: what runs where, not what it does.

`parse` returns a tree of commands with their line numbers; `branches` follows it. Words keep their quotes and
variables. Of the shell's grammar this reads lists, pipelines, `if`, `case`, loops, functions, groups, arrays
and here-documents; nothing is ever run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Deeper nesting is refused, so that no file can exhaust the stack.
_DEEPEST = 50
_CLOSES = {"(": ")", "{": "}"}
#: Longest first.
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTS = ("<<<", "<<-", "<<", "<>", "<&", "<", ">>", ">|", ">&", ">", "&>>", "&>")
_ENDS_OF_CLAUSE = (";;", ";&", ";;&")


@dataclass(frozen=True)
class Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_word: bool


@dataclass(frozen=True)
class Simple:
    """A command without redirections: `NAME=VALUE`, `NAME=( … )`, `[[ … ]]`, `torchrun …`."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """Commands joined by `operators`: "&&", "||" or "|"."""

    line: int
    parts: tuple[Node, ...]
    operators: tuple[str, ...]
    negated: bool = False


@dataclass(frozen=True)
class Branch:
    """`if` with its `elif`s: conditions with their bodies; an empty condition is `else`."""

    line: int
    clauses: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class ShellCase:
    """`case WORD in PATTERN | PATTERN) body ;; … esac`."""

    line: int
    word: str
    clauses: tuple[tuple[tuple[str, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Loop:
    """`for`, `select`, `while` or `until`; `values` are the words of a `for`."""

    line: int
    head: str
    variable: str | None
    values: tuple[str, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Function:
    """The definition of a function, whose body runs where it is called."""

    line: int
    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True)
class ShellGroup:
    """`{ … }` or `( … )`."""

    line: int
    body: tuple[Node, ...]


Node = Simple | Chain | Branch | ShellCase | Loop | Function | ShellGroup


def parse(text: str) -> tuple[Node, ...]:
    """Return the commands of a script.

    Raises:
        ValueError: a quote, bracket or compound command is not closed, or the nesting is too deep. The
            message names the line.
    """
    parser = _Parser(list(tokens(text)))
    found = parser.commands(())
    if not parser.at_end:
        parser.fail(f"{parser.peek().text!r} has no beginning")
    return found


def tokens(text: str) -> Iterator[Token]:
    """Split text into words and operators. Comments, redirections and here-documents are left out.

    Raises:
        ValueError: as `parse`.
    """
    at, line, documents, end = 0, 1, list[str](), len(text)
    while at < end:
        rest = text[at : at + 3]
        if rest.startswith(("\\\n", "\\\r\n")):
            at += 2 + (rest[1] == "\r")
            line += 1
        elif rest[0] in " \t\r":
            at += 1
        elif rest[0] == "#":
            at = _line_end(text, at)
        elif not rest.startswith(("<(", ">(")) and (
            redirect := next((r for r in _REDIRECTS if rest.startswith(r)), None)
        ):
            at += len(redirect)
            while text[at : at + 1] in (" ", "	"):
                at += 1
            target = _word_end(text, at, line)
            if redirect in ("<<", "<<-"):
                documents.append(text[at:target].strip("\"'\\"))
            line += text.count("\n", at, target)
            at = target
        elif operator := next((o for o in _OPERATORS if rest.startswith(o)), None):
            yield Token(operator, line, False)
            at += len(operator)
            if operator == "\n":
                line += 1
                for name in documents:
                    at, lines = _after_document(text, at, name, line)
                    line += lines
                documents = []
        else:
            substitutes = rest.startswith(("<(", ">("))  # <(command)
            until = _bracket_end(text, at + 1, line) if substitutes else _word_end(text, at, line)
            until = max(until, at + 1)
            word = text[at:until]
            # The file descriptor of a redirection, "2>&1", is no word.
            if not (word.isdecimal() and text[until : until + 1] in ("<", ">")):
                yield Token(word, line, True)
            line += word.count("\n")
            at = until


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _after_document(text: str, at: int, name: str, line: int) -> tuple[int, int]:
    """Return where a here-document ends, and its number of lines."""
    lines = 0
    while at < len(text):
        until = _line_end(text, at)
        lines += 1
        found, at = text[at:until].strip(), until + 1
        if found == name:
            return at, lines
    raise ValueError(f"line {line}: the here-document {name} is not closed")


def _word_end(text: str, at: int, line: int) -> int:
    """Return the end of the word that begins at `at`; it is `at` itself if none does."""
    begin, end = at, len(text)
    while at < end:
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'\"`":
            at = _quote_end(text, at, line)
        elif char == "$" and text[at + 1 : at + 2] in _CLOSES:
            at = _bracket_end(text, at + 1, line)
        elif char == "(" and (at == begin or text[at - 1] in "=<>@?*+!"):  # an array, ((…)), <(…)
            at = _bracket_end(text, at, line)
        elif char in " \t\r\n;|&()<>":
            break
        else:
            at += 1
    return min(at, end)


def _quote_end(text: str, at: int, line: int) -> int:
    """Return the position after the quote that begins at `at`."""
    quote, begin = text[at], at
    at += 1
    while at < len(text) and text[at] != quote:
        if text[at] == "\\" and quote != "'":
            at += 1
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in _CLOSES:
            at = _bracket_end(text, at + 1, line) - 1
        at += 1
    if at >= len(text):
        shown = text[begin:].split("\n", 1)[0][:60]
        raise ValueError(f"line {line}: a quote is not closed in {shown!r}")
    return at + 1


def _bracket_end(text: str, at: int, line: int) -> int:
    """Return the position after the bracket that closes the one at `at`."""
    opening, begin, stack = text[at], at, list[str]()
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"`" and not (char == "'" and opening == "{"):
            at = _quote_end(text, at, line) - 1
        elif char == "#" and opening == "(" and text[at - 1] in " \t\n(":
            at = _line_end(text, at) - 1
        elif char == opening:
            stack.append(char)
        elif char == _CLOSES[opening]:
            stack.pop()
            if not stack:
                return at + 1
        at += 1
    shown = text[begin:].split("\n", 1)[0][:60]
    raise ValueError(f"line {line}: a bracket is not closed in {shown!r}")


@dataclass
class _Parser:
    """Recursive descent over the tokens of a script."""

    tokens: list[Token]
    at: int = 0
    depth: int = 0

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.tokens)

    def peek(self) -> Token:
        last = self.tokens[-1].line if self.tokens else 1
        return self.tokens[self.at] if not self.at_end else Token("the end of the text", last, False)

    def next(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def fail(self, problem: str, line: int | None = None) -> None:
        raise ValueError(f"line {line or self.peek().line}: {problem}")

    def expect(self, text: str, line: int, what: str) -> None:
        self.skip_lines()
        if self.at_end or self.next().text != text:
            self.fail(f"{what} has no {text}", line)

    def skip_lines(self) -> None:
        while not self.at_end and self.peek().text in ("\n", ";", "&") and not self.peek().is_word:
            self.at += 1

    def commands(self, ends: Sequence[str]) -> tuple[Node, ...]:
        """Read commands until one of `ends`, which stays unread, or the end of the text."""
        self.depth += 1
        if self.depth > _DEEPEST:
            self.fail(f"commands are nested more than {_DEEPEST} deep")
        found: list[Node] = []
        while True:
            self.skip_lines()
            if self.at_end or self.peek().text in ends or self.peek().text in (*_ENDS_OF_CLAUSE, ")"):
                self.depth -= 1
                return tuple(found)
            found.append(self.chain())

    def chain(self) -> Node:
        line, parts, operators = self.peek().line, list[Node](), list[str]()
        negated = self.peek().text == "!" and self.peek().is_word
        self.at += negated
        while True:
            parts.append(self.command())
            token = self.peek()
            if self.at_end or token.is_word or token.text not in ("&&", "||", "|", "|&"):
                break
            operators.append(self.next().text[:2].replace("|&", "|"))
            while not self.at_end and self.peek().text == "\n":
                self.at += 1
        if len(parts) == 1 and not negated:
            return parts[0]
        return Chain(line, tuple(parts), tuple(operators), bool(negated))

    def command(self) -> Node:
        token = self.peek()
        if token.text == "(" and not token.is_word:
            self.at += 1
            return self._closed(token, ")")
        match token.text if token.is_word else "":
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for" | "select" | "while" | "until":
                return self._loop()
            case "{":
                self.at += 1
                return self._closed(token, "}")
        return self._simple()

    def _closed(self, opening: Token, end: str) -> ShellGroup:
        body = self.commands((end,))
        self.expect(end, opening.line, opening.text)
        return ShellGroup(opening.line, body)

    def _if(self) -> Branch:
        line, clauses = self.next().line, []
        word = "if"
        while word in ("if", "elif"):
            condition = self.commands(("then",))
            self.expect("then", line, "if")
            clauses.append((condition, self.commands(("elif", "else", "fi"))))
            word = self.next().text
        if word == "else":
            clauses.append(((), self.commands(("fi",))))
            word = self.next().text
        if word != "fi":
            self.fail("if has no fi", line)
        return Branch(line, tuple(clauses))

    def _case(self) -> ShellCase:
        line, clauses = self.next().line, list[tuple[tuple[str, ...], tuple[Node, ...]]]()
        word = self.next().text
        self.expect("in", line, "case")
        while True:
            self.skip_lines()
            if self.peek().text == "esac":
                self.at += 1
                return ShellCase(line, word, tuple(clauses))
            patterns: list[str] = []
            while not self.at_end and self.peek().text != ")":
                token = self.next()
                if token.is_word:
                    patterns.append(token.text)
            if self.at_end:
                self.fail("case has no esac", line)
            self.at += 1
            clauses.append((tuple(patterns), self.commands(("esac",))))
            if self.peek().text in _ENDS_OF_CLAUSE:
                self.at += 1

    def _loop(self) -> Loop:
        kind = self.next()
        head, variable, values = kind.text, None, list[str]()
        if kind.text in ("for", "select"):
            variable = self.next().text
            head += f" {variable}"
            if self.peek().text == "in":
                self.at += 1
                while not self.at_end and self.peek().is_word:
                    values.append(self.next().text)
        else:
            condition = self.commands(("do",))
            head += " " + next((" ".join(node.words) for node in condition if isinstance(node, Simple)), "…")
        self.expect("do", kind.line, kind.text)
        body = self.commands(("done",))
        self.expect("done", kind.line, kind.text)
        return Loop(kind.line, head, variable, tuple(values), body)

    def _simple(self) -> Node:
        line, words = self.peek().line, list[str]()
        while not self.at_end and (self.peek().is_word or words[:1] == ["[["]):
            token = self.next()
            words.append(token.text)
            if token.text == "]]":
                break
            if words[0] == "function" and len(words) == 2:
                if self.peek().text == "(":
                    self.at += 2
                return self._function(line, words[1])
        if len(words) == 1 and self.peek().text == "(" and not self.peek().is_word:
            self.at += 1
            self.expect(")", line, words[0])
            return self._function(line, words[0])
        if not words:
            self.fail(f"{self.peek().text!r} is not a command")
        return Simple(line, tuple(words))

    def _function(self, line: int, name: str) -> Function:
        self.skip_lines()
        body = self.command()
        return Function(line, name, body.body if isinstance(body, ShellGroup) else (body,))
