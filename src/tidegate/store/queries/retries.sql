-- Retries: a new job over some items of one that ended, and the file that holds the answers of both.

-- job_retry_put --
update jobs set retry_of = :retry_of, retry_choice = :choice, retry_file_id = :retry_file_id, merged_file_id = :merged_file_id
where id = :id;

-- job_retried --
-- The only thing that changes of a job that ended: which jobs run items of it again.
update jobs set retried_by = :retried_by where id = :id;

-- job_merged_none --
update jobs set merged_file_id = null where id = :id;

-- extents_share --
-- The pieces of one file stand in another too, from a place on: no bytes are copied.
insert into extents (file_id, at, size_bytes, blob_id, blob_at)
select cast(:to_file_id as text), cast(:from_at as bigint) + e.at, e.size_bytes, e.blob_id, e.blob_at
from extents e
where e.file_id = :file_id
returning blob_id;

-- blob_lend --
-- More files are made of these bytes.
update blobs set uses = uses + :uses where id = :id and state in ('writing', 'kept') returning id;
