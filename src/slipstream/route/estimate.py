"""What a choice costs and how long it takes, the prompt that must be read again elsewhere included.

    time  = latency + unread prompt / prefill speed + answer / decode speed
    money = cached prompt x cached price + unread prompt x input price + answer x output price

A target's KV cache serves all its tiers. The answer's length is the catalogue's `expected_output`, cut at `max_tokens`.
Knows nothing about which choice is wise; policies do.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.route.decision import Catalogue, Choice, Conversation, Estimate, RouteError, SessionState, Target


def parse_choice(text: str, catalogue: Catalogue) -> Choice | None:
    """`target/tier`, or `target` for its first tier; None where it cannot be asked now."""
    name, _, tier = text.partition("/")
    target = catalogue.targets.get(name)
    if target is None or not target.tiers or (tier and tier not in target.tiers):
        return None
    return Choice(name, tier or next(iter(target.tiers)))


def estimate(choice: Choice, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Estimate:
    """Seconds and dollars of the next step. reread_tokens: of the prompt, what only `state.last` holds."""
    tier = catalogue.targets[choice.target].tiers[choice.tier]
    prompt = conversation.prompt_tokens
    cached = min(state.cached.get(choice.target, 0), prompt)
    held = min(state.cached.get(state.last.target, 0), prompt) if state.last else 0
    output = expected_output(conversation, catalogue)
    time_s = tier.latency_s + (prompt - cached) / tier.prefill_speed + output / tier.decode_speed
    dollars = cached * tier.cached_price + (prompt - cached) * tier.input_price + output * tier.output_price
    return Estimate(choice, time_s, dollars / 1e6, max(0, held - cached))


def settled(choice: Choice, conversation: Conversation, state: SessionState, catalogue: Catalogue) -> Estimate:
    """The same of a later step, when the choice has read the prompt."""
    return estimate(
        choice, conversation, replace(state, cached={choice.target: conversation.prompt_tokens}, last=choice), catalogue
    )


def expected_output(conversation: Conversation, catalogue: Catalogue) -> int:
    limit = conversation.max_tokens
    return catalogue.expected_output if limit is None else min(limit, catalogue.expected_output)


def declined(target: Target, conversation: Conversation, catalogue: Catalogue) -> str | None:
    """Why `target` cannot take the request; None where it can."""
    if conversation.prompt_tokens + expected_output(conversation, catalogue) > target.context:
        return f"{target.name}: {conversation.prompt_tokens} tokens do not fit its context of {target.context}"
    if conversation.tools and not target.tools:
        return f"{target.name}: it takes no tools"
    if not target.images and any(message.images for message in conversation.messages):
        return f"{target.name}: it takes no images"
    return None


def feasible(conversation: Conversation, catalogue: Catalogue) -> list[Choice]:
    """Every choice that can take the request. Raises RouteError with each target's reason where there is none."""
    reasons = {name: declined(target, conversation, catalogue) for name, target in catalogue.targets.items()}
    choices = [
        Choice(name, tier) for name, target in catalogue.targets.items() if not reasons[name] for tier in target.tiers
    ]
    if not choices:
        said = "; ".join(reason for reason in reasons.values() if reason) or "none is up"
        raise RouteError(f"no target can take this request ({said}); shorten it, or add a target that can")
    return choices
