"""Translate between Anthropic Messages and OpenAI chat completions: requests, answers, errors and
streams.

    request   request_to_openai, request_to_anthropic     a field without a counterpart on the other side is refused by its path
    answer    answer_to_openai, answer_to_anthropic       usage, cached tokens, tool calls and stop reasons are translated too
    error     error_to_openai, error_to_anthropic
    stream    StreamToOpenai, StreamToAnthropic           bytes in, bytes out, an event at a time

Nothing is dropped silently: a field that would change the answer is refused, and the few fields
that are only hints (for caches, labels) are named in `left_out`. This package knows shapes only: no
HTTP, no clock and no deployment.
"""

from tidegate.core.translate.answers import answer_to_anthropic, answer_to_openai
from tidegate.core.translate.fields import Translated
from tidegate.core.translate.problems import error_to_anthropic, error_to_openai, is_error_of, says_why
from tidegate.core.translate.request_to_anthropic import request_to_anthropic
from tidegate.core.translate.request_to_openai import OPENAI, VLLM, OpenAiDialect, request_to_openai
from tidegate.core.translate.stream_to_anthropic import StreamToAnthropic
from tidegate.core.translate.stream_to_openai import StreamToOpenai

__all__ = [
    "OPENAI",
    "VLLM",
    "OpenAiDialect",
    "StreamToAnthropic",
    "StreamToOpenai",
    "Translated",
    "answer_to_anthropic",
    "answer_to_openai",
    "error_to_anthropic",
    "error_to_openai",
    "is_error_of",
    "request_to_anthropic",
    "request_to_openai",
    "says_why",
]
