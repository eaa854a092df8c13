"""See the package."""


def tokens_input(tokens: list[int]) -> dict[str, list[int]]:
    """A prompt."""
    return {"prompt_token_ids": tokens}
