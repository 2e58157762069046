-- Retries: a new job with some items of an ended job, and the file with the answers of both.

-- job_retry_put --
update jobs set retry_of = :retry_of, retry_choice = :choice, retry_file_id = :retry_file_id, merged_file_id = :merged_file_id
where id = :id;

-- job_retried --
-- The only change of an ended job: the jobs that run items of it again.
update jobs set retried_by = :retried_by where id = :id;

-- job_merged_none --
update jobs set merged_file_id = null where id = :id;

-- extents_share --
-- Give a file the extents of another, from a place on. No bytes are copied.
insert into extents (file_id, at, size_bytes, blob_id, blob_at)
select cast(:to_file_id as text), cast(:from_at as bigint) + e.at, e.size_bytes, e.blob_id, e.blob_at
from extents e
where e.file_id = :file_id
returning blob_id;

-- blob_lend --
-- Add uses of these bytes by more files.
update blobs set uses = uses + :uses where id = :id and state in ('writing', 'kept') returning id;
