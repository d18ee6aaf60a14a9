"""What a dependent launch asks of a kernel, read out of its PTX.

A kernel that lets the next one begin early must wait for the one ahead (griddepcontrol.wait) before it writes
anything, for the one ahead may still read it, and on every way to its end: were it over before the one ahead,
the next kernel's wait would end too early.
"""

import re

_LABEL = re.compile(r"^(\$\w+):$")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_WRITE = re.compile(r"\b(?:st|atom|red)(?:\.\w+)*\.global\b")
_END = re.compile(r"^(?:@\S+\s+)?(?:ret|exit);")


def broken_waits(ptx: str) -> list[str]:
    """Writes and ends of a kernel that some way from its beginning reaches without a wait."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in ptx[ptx.index("\n{", ptx.index(".entry")) + 2 :].splitlines():
        said = line.split("//")[0].strip()
        if label := _LABEL.match(said):
            labels[label.group(1)] = len(instructions)
        elif said:
            instructions.append(said)
    found, seen, to_do = [], set[int](), [0]
    while to_do:
        at = to_do.pop()
        while at < len(instructions) and at not in seen:
            seen.add(at)
            said = instructions[at]
            if "griddepcontrol.wait" in said:
                break
            if _WRITE.search(said) or _END.match(said):
                found.append(said)
            if branch := _BRANCH.search(said):
                to_do.append(labels[branch.group(1)])
            if (branch or _END.match(said)) and not said.startswith("@"):
                break
            at += 1
    return found
