"""The paths of the Message Batches API."""

PATH = "/v1/messages/batches"
ONE = PATH + "/{message_batch_id}"
