"""firn's own answers: audit, inventory and dry runs, as its programs give them."""

import json
from dataclasses import dataclass

import host as hosts
from host import Failed

# What `firn audit` ends with.
STATUS = {"can": 0, "cannot": 1, "suspected": 3}


@dataclass
class Audit:
    """What an audit came to: the codes for which a checkpoint would be refused, and what else speaks against one."""

    verdict: str
    codes: list
    suspected: list
    cuda: list


def audit(setup, container, end):
    """Audit a running container; its output is kept as evidence."""
    done = setup.host.run(
        "firn", "audit", container.name, "--namespace", hosts.NAMESPACE, "--json", deadline=end, check=False)
    with open(f"{setup.evidence}/{container.name}.audit.json", "w", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    return parse_audit(done.returncode, done.stdout, done.stderr)


def parse_audit(status, text, errors=""):
    """The audit's answer from its JSON; status and verdict must agree."""
    try:
        report = json.loads(text)
    except ValueError:
        raise Failed(f"firn audit ended with {status} and no answer: {errors.strip()}") from None
    if "verdict" not in report:
        raise Failed(f"firn audit ended with {status} and no answer: {report['failure']['message']}")
    verdict = report["verdict"]
    if STATUS.get(verdict) != status:
        raise Failed(f"firn audit reports {verdict} and ends with {status}")
    signals = report["signals"]
    return Audit(
        verdict,
        [signal["failure"]["code"] for signal in signals if signal["refused"]],
        [signal["signal"] for signal in signals if not signal["refused"] and signal["certainty"] != "none"],
        [process["pid"] for process in report["processes"] if process["cuda"]],
    )


def must_refuse(audited, codes):
    """The audit reported that it cannot be, by one of these codes."""
    if audited.verdict != "cannot" or not set(audited.codes) & set(codes):
        raise Failed(f"the audit reports {audited.verdict} ({audited.codes}), not {' or '.join(codes)}")


def inventory(setup, end):
    """The machine's GPUs and the links between them."""
    return json.loads(setup.host.run("firn-gpu", "inventory", deadline=end).stdout)


def plan(setup, directory, spec, end):
    """Onto which GPUs an image would be restored here: new UUID by old."""
    done = setup.host.run(
        "firn", "restore", directory, "--dry-run", "--spec", spec, "--json", deadline=end, check=False)
    return parse_plan(done.stdout, done.stderr)


def parse_plan(text, errors=""):
    """The map of a restore that would be accepted."""
    try:
        answer = json.loads(text)
    except ValueError:
        raise Failed(f"firn restore --dry-run gave no answer: {errors.strip()}") from None
    if not answer.get("accepted"):
        raise Failed(f"firn restore --dry-run refuses: {answer['failure']}")
    return {pair["old"]: pair["new"] for pair in answer.get("map", [])}


def nvlinks(found):
    """Number of NVLinks by pair of GPUs; none for pairs of which the driver reports nothing."""
    links = found["topology"]["links"]
    return {frozenset(link["gpus"]): link["nvlinks"] for link in links if link.get("nvlinks") is not None}


def links_kept(links, moved):
    """The NVLinks of every pair of GPUs before and after a move; fails where there are fewer."""
    kept = []
    for pair, count in sorted(links.items(), key=lambda item: sorted(item[0])):
        if not pair <= set(moved):
            continue
        there = links.get(frozenset(moved[uuid] for uuid in pair), 0)
        if there < count:
            raise Failed(f"{sorted(pair)} are joined by {count} NVLinks, their partners by {there}")
        kept.append(f"{count} -> {there}")
    return kept
