"""OpenAI's Files and Batches, their events, and the list of models."""
