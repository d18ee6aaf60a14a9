"""`ostinato bench compare A.json B.json`: what changed from A to B."""

from __future__ import annotations

import argparse

from ostinato.bench.compare import compare, regressions
from ostinato.bench.results import find_result
from ostinato.tools.bench_report import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", help="result file, or FILE#LABEL for one in it")
    parser.add_argument("after", metavar="B.json", help="the result to judge")
    parser.add_argument(
        "--fail-over",
        type=float,
        metavar="PERCENT",
        help="exit with 1 when a number is worse by more than this",
    )


def run(arguments: argparse.Namespace) -> int:
    changes = compare(find_result(arguments.before), find_result(arguments.after))
    point = ""
    for change in changes:
        if change.point != point:
            point = change.point
            print(f"{point}\n  {'':24} {'A':>10} {'B':>10} {'B/A':>7}")
        ratio = "-" if change.ratio is None else f"{change.ratio:.3f}"
        print(
            f"  {change.number:24} {plain(change.before):>10} {plain(change.after):>10} {ratio:>7}  "
            f"{change.verdict}"
        )
    print("better/worse: beyond both 95 % intervals; same: within; ?: one run does not say (use --runs)")
    if arguments.fail_over is None:
        return 0
    worse = regressions(changes, arguments.fail_over)
    for change in worse:
        print(f"worse by more than {arguments.fail_over:g} %: {change.point} {change.number}")
    return 1 if worse else 0
