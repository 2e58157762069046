"""OpenAI's Files, Uploads and Batches, their events, and the list of models."""
