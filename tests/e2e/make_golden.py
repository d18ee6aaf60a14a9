"""Write `golden_smollm2.json`: what transformers' `generate` answers to 20 prompts, greedy, in float32.

    python -m tests.e2e.make_golden MODEL.gguf      (from the repository's root; two minutes on two cores)

The prompts are cut out of one text at lengths around block and chunk edges. `margin` is the least distance,
over the 64 steps, between the best and the second best logit: a prompt whose margin is near the rounding of
float32 (about 1e-4 of a logit here) would prove nothing when a token flips. Another text is then taken for
its length, and the header names what was skipped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PATH = Path(__file__).with_name("golden_smollm2.json")
NEW_TOKENS = 64
MIN_MARGIN = 2e-3
LENGTHS = (5, 6, 9, 12, 15, 16, 17, 24, 31, 33, 47, 64, 65, 100, 129, 190, 257, 400, 513, 900)

PARAGRAPHS = (
    "The lighthouse keeper counted the ships every evening and wrote their names into a long green book. "
    "On calm days the list was short, because the captains preferred the open sea to the narrow channel "
    "between the rocks, and only fishing boats came close enough to be recognised by their sails.",
    "Bread needs four things: flour, water, salt and time. The first three can be bought in any village. "
    "The fourth is the one that most people try to save, and it is the reason why so much bread tastes of "
    "nothing. A dough that rests for a whole night in a cool place becomes soft, sour and easy to shape.",
    "A compiler reads a program twice. The first time it wants to know what the words mean; the second time "
    "it asks which of them are needed at all. Everything that is computed and never used can be left out, "
    "and whatever is computed twice in the same way can be computed once and kept.",
    "In the spring of that year the river rose higher than anyone could remember. The bridge held, but the "
    "road on both sides was gone, and for three weeks the children of the upper town had no school. They "
    "built rafts from old doors instead, and two of them learned to swim.",
    "The moons of Jupiter were the first bodies seen to circle something other than the Earth. Galileo drew "
    "them night after night as small stars beside a large one, moving from left to right and back again, "
    "and by the end of the winter he could say in advance where each of them would stand.",
    "My grandmother kept bees behind the garden wall. She said that they knew her voice, which was surely "
    "not true, but she was never stung, and the honey she gave us at Christmas was dark and smelled of "
    "chestnut trees. When she died, my uncle went out and told the hives, as it had always been done.",
    "To measure the height of a tower without climbing it, wait until your own shadow is exactly as long as "
    "you are tall. At that moment the shadow of the tower is as long as the tower is high, and it can be "
    "paced off on the ground. The method works once in the morning and once in the afternoon.",
    "Trains in the valley never left on time, and nobody minded. The driver knew every passenger, waited "
    "for the late ones, and stopped between stations when somebody with a heavy bag lived near the track. "
    "After the new company came, the trains were punctual and empty.",
    "A good question is one that can be answered in more than one way. Questions with a single answer are "
    "useful for examinations, and for very little else. When the teacher asked why the sky is blue, she "
    "did not want to hear about the air; she wanted to know who had ever doubted it.",
    "The old harbour had a crane that was moved by two men walking inside a wheel. It could lift a barrel of "
    "wine from a ship in less than a minute, and the men were paid by the barrel. In winter, when no ships "
    "came, they repaired roofs, and it was said that they walked faster than anyone in the town.",
    "Every language has a word that cannot be translated, and people are proud of it. Usually it means some "
    "kind of longing. It would be more interesting to collect the words that every language has, such as "
    "mother, fire and tomorrow, and to ask why nobody is proud of those.",
    "Write the answer first and the reasons afterwards, said the editor. Readers who agree will stop after "
    "the first line, and readers who do not will look for the mistake, which is what you want them to do. "
    "Nobody has ever been convinced by an introduction.",
    "The museum keeps one room for things whose use has been forgotten. There is a spoon with a hole, a pair "
    "of wooden wheels no larger than a coin, and a box that can only be opened from the inside. Visitors are "
    "asked to write down what they think; the best answers hang on the wall, and none of them agree.",
    "Snow fell for the first time in eleven years. The buses stopped, the shops closed, and people who had "
    "lived next to each other without a word began to clear the pavement together. By the evening there was "
    "soup on a table in the middle of the street, and somebody had brought an accordion.",
    "When a pendulum is made four times as long, it swings half as fast. The weight at its end does not "
    "matter, and neither, as long as the swing is small, does its width. Clocks were built on this for three "
    "hundred years, and the best of them lost less than a second in a month.",
)


def cut(tokenizer: transformers.PreTrainedTokenizerFast, start: int, length: int) -> list[int]:
    """Token ids of a prompt: the paragraphs from `start` on, cut to the wanted length."""
    start %= len(PARAGRAPHS)
    ids = tokenizer("\n\n".join(PARAGRAPHS[start:] + PARAGRAPHS[:start])).input_ids
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens, a prompt wants {length}")
    return list(ids[:length])


@torch.no_grad()
def answer(model: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], float]:
    """The greedy continuation, through EOS if it comes, and its least margin."""
    plan = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    out = model.generate(torch.tensor([prompt]), generation_config=plan)
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().model
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(**place)
    lines: list[str] = []
    skipped = []
    for number, length in enumerate(LENGTHS):
        for start in range(number, number + len(PARAGRAPHS)):
            prompt = cut(tokenizer, start, length)
            tokens, margin = answer(model, prompt)
            print(f"{length} tokens from paragraph {start}: margin {margin:.4f}", flush=True)
            if margin >= MIN_MARGIN:
                lines.append(json.dumps({"margin": round(margin, 5), "prompt": prompt, "new": tokens}))
                break
            skipped.append(f"{length} tokens from paragraph {start}: margin {margin:.5f}")
    header = {
        "model": path.name,
        "dtype": "float32",
        "made_by": "tests/e2e/make_golden.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "skipped_near_ties": skipped,
    }
    if len(lines) != len(LENGTHS):
        raise ValueError(f"{len(LENGTHS) - len(lines)} lengths have no prompt without a near-tie")
    cases = ",\n".join(lines)
    PATH.write_text(f'{{"header": {json.dumps(header)},\n"cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()
