-- A line that was recorded can be told from one that was changed since: what never ran, and what was recorded before this, has no checksum.

alter table outcomes add column
    crc32 bigint;
