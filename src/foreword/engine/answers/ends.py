"""When a request is over: with the end of its last answer."""

from foreword.engine.messages import AnswerDelta


class OpenAnswers:
    """Counts the answers of a request, or of several, that have not ended."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    def note(self, item: AnswerDelta | Exception) -> bool:
        """Take what came; True if nothing can come after it. A failure ends all answers."""
        if isinstance(item, Exception):
            self.left = 0
        else:
            self.left -= item.finish_reason is not None
        return not self.left
