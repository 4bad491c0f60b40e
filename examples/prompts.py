"""What the demo asks for: beginnings that share a long opening, and some that share nothing. Written for the demo."""

from __future__ import annotations

import dataclasses

# Every request of the first group begins with this, as chats begin with one system prompt.
EVENING = """\
The rain had not ceased since the morning, and the whole party at Ashcombe were obliged to remain within doors. The \
gentlemen had tried the billiard-room and were tired of it; the ladies had written all their letters, and there was \
nobody left to whom a letter could be owed. Mrs. Weston sat at her work near the window, with her younger daughter \
beside her; Captain Harlow, who had come from his ship but a week before, stood with his back to the fire, and was \
asked by everybody in turn what it was to be at sea in such weather. He answered that the sea was very well, that he \
had known it worse, and that he would rather speak of anything else; and this modesty, as it commonly does, made \
every one wish to hear more. Miss Weston alone said nothing. She had her own reasons for not looking towards the \
fire, and for thinking that the evening would never be at an end. At last her mother put down her needle, and looked \
round upon them all. "Since we cannot walk," said she, "and since nobody will play, let every one of us tell a \
story; and let it begin at once." There was a general silence, and then a general laugh. """

# Two requests share this one.
CITY = """\
And it came to pass in the days when there was no king in the land, that a certain man of the hill country went down \
to the city, he and his two sons with him. And the name of the elder was Joram, and the name of the younger was Abel. \
And they came unto the gate of the city at even, and sat them down by the well; and behold, there was no man that \
took them into his house to lodging. Then came there an old man from his work out of the field. """


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request before it is one.

    Args:
        title: For the reader.
        text: What the model continues.
        shown: How much of the end of `text` is printed before the continuation, in characters.
        arrival: Engine step.
        share: Of the tokens that each request may write at most.
    """

    title: str
    text: str
    shown: int
    arrival: int
    share: float


def _prompt(title: str, opening: str, own: str, arrival: int, share: float) -> Prompt:
    return Prompt(title, opening + own, len(own), arrival, share)


PROMPTS = [
    _prompt("the captain", EVENING, 'The captain was the first to begin. "When I was ', 0, 1.0),
    _prompt("the mother", EVENING, 'Mrs. Weston would not hear of waiting. "My dear ', 0, 0.7),
    _prompt("the gate", CITY, "And the old man lifted up his eyes, and said unto them, ", 2, 0.8),
    _prompt("the elder daughter", EVENING, "Miss Weston coloured deeply, and ", 4, 0.9),
    _prompt("the whale", "", "It was a clear, cold morning upon the deck, and the old captain", 6, 1.0),
    _prompt("the younger daughter", EVENING, '"Oh! I know a story," cried Fanny, "it is about ', 9, 0.6),
    _prompt("the sons", CITY, "And Joram answered and said, ", 14, 0.9),
    _prompt("a stranger", EVENING, "But before any body could speak, the door was opened, and ", 20, 0.8),
    _prompt("the clergyman", EVENING, "Mr. Elliot, who was to have the living, observed that ", 28, 0.5),
    _prompt("the weather", EVENING, "In the mean time the rain ", 36, 0.4),
]
