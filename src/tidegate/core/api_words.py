"""The fixed words of the APIs: names of fields, and values that name a kind.

Guardrails do not look at these words. Each is fixed, so no text of a caller or a model can hide
among them. A word that is missing here is looked at like any text.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FIELDS = _words("""
    $defs $ref $schema additionalProperties allOf annotations anyOf arguments audio audio_url author authorization background
    best_of budget_tokens bytes cache_control cache_creation_input_tokens cache_read_input_tokens cached_tokens call_id
    categories category_applied_input_types category_scores choices citations code completion_tokens completion_tokens_details
    const container content content_block content_index conversation created created_at custom data default delta description
    detail dimensions disable_parallel_tool_use document documents echo effort embedding enabled encoding_format
    encrypted_content enum error events examples exclusiveMaximum exclusiveMinimum file file_data file_id file_ids file_url
    filename finish_reason flagged format frequency_penalty function function_call functions id image image_url include
    include_usage incomplete_details index input input_audio input_ids input_schema input_text input_tokens input_tokens_details
    input_type inputs instructions is_error item_id item_reference items json_schema kv_transfer_params legacy_thinking_id
    logit_bias logprob logprobs maxItems maxLength max_completion_tokens max_num_results max_output_tokens max_tokens
    max_tool_calls maximum media_type message messages metadata minItems minLength min_p min_tokens minimum modalities model
    multipleOf n name not num_ctx object oneOf output output_index output_text output_tokens output_tokens_details
    parallel_tool_calls parameters parts pattern phase prediction prefix presence_penalty previous_response_id prompt
    prompt_cache_key prompt_logprobs prompt_token_ids prompt_tokens prompt_tokens_details properties quality query reasoning
    reasoning_content reasoning_effort reasoning_tokens refusal relevance_score repetition_penalty required response
    response_format results return_documents role safety_identifier schema score seed sequence_number service_tier signature
    size source status stop stop_reason stop_sequence stop_sequences store stream stream_options strict suffix summary
    summary_index system system_fingerprint temperature text text_offset thinking timeout title token token_ids token_logprobs
    tokens tool_call_id tool_calls tool_choice tool_use_id tools top_k top_logprobs top_n top_p total_tokens transcript
    truncation type uniqueItems url usage user user_id value vector_store_ids verbosity video_url voice
""")

KINDS = _words("""
    author detail effort encoding_format finish_reason format media_type mode object reasoning_effort role service_tier status
    stop_reason summary tool_choice truncation type verbosity
""")

WORDS = _words("""
    adaptive any application/pdf array assistant auto base64 boolean cancelled chat.completion chat.completion.chunk completed
    concise content content_filter critic custom date date-time default detailed developer disabled document email embedding enabled
    end_turn ephemeral error failed file flex float function function_call function_call_output high image image/gif image/jpeg
    image/png image/webp image_url in_progress incomplete input_audio input_file input_image input_text integer json_object
    json_schema length list low max_tokens medium message minimal model mp3 none null number object output_message output_text
    pause_turn priority queued reasoning reasoning_text redacted_thinking refusal required response server_tool_use standard stop
    stop_sequence string summary_text system text text/plain text_completion text_delta thinking tool tool_calls tool_result
    tool_use uri url url_citation user uuid wav xhigh
""")

# Fields whose numbers are settings, counts or moments.
NUMBERED = _words("""
    best_of budget_tokens bytes cached_tokens category_scores completed_at completion_tokens content_index created created_at
    dimensions embedding exclusiveMaximum exclusiveMinimum expires_at frequency_penalty index input_tokens logit_bias logprob
    logprobs maxItems maxLength max_completion_tokens max_output_tokens max_tokens max_tool_calls maximum minItems minLength min_p
    min_tokens minimum multipleOf n num_ctx output_index output_tokens presence_penalty prompt_tokens queued_at reasoning_tokens
    relevance_score repetition_penalty score seed sequence_number started_at summary_index temperature text_offset timeout
    token_logprobs top_k top_logprobs top_n top_p total_tokens
""")
