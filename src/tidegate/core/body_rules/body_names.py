"""Names in a request's body that a caller may or may not use, sorted by what they do at a server.

They come from the public APIs of OpenAI and Anthropic and from the extra parameters of vLLM, SGLang
and gateways. Tables whose name ends with `SPELLED` map a folded name to the API's own spelling.
"""

from collections.abc import Iterable, Mapping

from tidegate.core.deployments import EngineKind
from tidegate.core.usage.answer_bounds import COUNTS, LEAST_LENGTHS, LENGTHS

# Parameters of the engines that an operator runs, beside OpenAI's. They change the order of the
# queue, run templates or code, pull caches and tensors from a place that the caller names, choose
# adapters, or name a request or session of another caller.
_OF_ANY_ENGINE = frozenset(
    {
        "audio_embeds", "chat_template", "image_embeds", "input_embeds", "kv_transfer_params", "priority", "prompt_embeds", "video_embeds",
    }
)  # fmt: skip
_OF_VLLM = _OF_ANY_ENGINE | {
    "ec_transfer_params", "guided_decoding_backend", "logits_processors", "media_io_kwargs", "mm_processor_kwargs",
    "previous_input_messages", "request_id", "uuid", "vllm_xargs",
}  # fmt: skip
_OF_SGLANG = _OF_ANY_ENGINE | {
    "audio_data", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "custom_labels", "custom_logit_processor",
    "custom_params", "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "image_data", "images_config", "lora_path",
    "ngram_corpus_id", "return_hidden_states", "rid", "routed_dp_rank", "session_id", "session_params", "stop_regex", "video_data",
}  # fmt: skip
# A gateway behind us may take another model, server or key from the body.
_OF_GATEWAYS = {"api_base", "api_key", "base_url", "extra_headers", "fallbacks", "model_list", "models", "user_config"}
ENGINE_FIELDS: Mapping[EngineKind, frozenset[str]] = {
    EngineKind.VLLM: _OF_VLLM,
    EngineKind.SGLANG: _OF_SGLANG,
    EngineKind.OPENAI: frozenset(),
    EngineKind.ANTHROPIC: frozenset(),
    EngineKind.GENERIC: _OF_VLLM | _OF_SGLANG | _OF_GATEWAYS,
}
# Names of what a provider keeps, anywhere in the body. Those of `_IN_OBJECTS` count only where
# their object has an id.
_IN_OBJECTS = frozenset({"audio", "item_reference", "prompt", "voice"})
PROVIDER_FIELDS = _IN_OBJECTS | {
    "assistant_id", "cached_content", "container", "container_id", "conversation", "conversation_id", "file_id", "file_ids",
    "previous_response_id", "skill_id", "thread_id", "vector_store_id", "vector_store_ids",
}  # fmt: skip
KNOWN_FIELDS = frozenset().union(PROVIDER_FIELDS, *ENGINE_FIELDS.values())

# Parameters that we read ourselves: a server must not get another spelling of them.
_READ_HERE = frozenset(
    {
        *LENGTHS, *LEAST_LENGTHS, *COUNTS, "background", "input", "instructions", "messages", "model", "prompt", "service_tier", "stream",
        "stream_options", "system", "thinking", "tools",
    }
)  # fmt: skip
# Names that also occur in the parts of messages: tensors, and the name under which a server keeps
# an image for all callers.
IN_PARTS = frozenset({"audio_embeds", "image_embeds", "input_embeds", "prompt_embeds", "uuid", "video_embeds"})
_TEMPLATE_NAMES = frozenset({"chat_template", "conversation", "messages", "tokenize", "tools"})


def folded(name: str) -> str:
    """Return a name as the most lenient reader compares it."""
    return name.casefold().replace("_", "").replace("-", "")


def _by_folded(names: Iterable[str]) -> dict[str, str]:
    return {folded(name): name for name in names}


READ_SPELLED = _by_folded(_READ_HERE)
PROVIDER_SPELLED = _by_folded(PROVIDER_FIELDS - _IN_OBJECTS)
ENGINE_SPELLED = _by_folded(KNOWN_FIELDS - PROVIDER_FIELDS)
TEMPLATE_SPELLED = _by_folded(_TEMPLATE_NAMES)
# Under these, the caller chooses the names, and no server looks for files or objects there.
FREE = frozenset(
    {
        "arguments", "guidedjson", "inputschema", "jsonschema", "logitbias", "metadata", "outputschema", "parameters",
        "properties", "schema", "structuredoutputs",
    }
)  # fmt: skip
# Beside one of these, `documents` are texts and files to compare with it, and no records for the
# template of a chat.
QUERIES = frozenset({"queries", "query"})
MEDIA = frozenset(
    {
        "audio", "document", "file", "image", "inputaudio", "inputfile", "inputimage", "inputvideo", "media", "source", "video",
    }
)  # fmt: skip
MEDIA_KINDS = frozenset(
    {
        "audio", "audio_url", "document", "file", "file_url", "image", "image_url", "input_audio", "input_file", "input_image",
        "input_video", "media", "url", "video", "video_url",
    }
)  # fmt: skip
# Fields for a file's content, where some servers also take a URL.
CONTENTS = (MEDIA - {"source"}) | {"audiodata", "data", "filedata", "imagedata", "images", "videodata", "videos"}
# URLs of servers to call, not of files to fetch.
NOT_MEDIA = frozenset({"baseurl", "mcpservers", "serverurl"})
GIVES_WHOLE = {"reasoning": ("content", "encryptedcontent"), "image_generation_call": ("result",)}
