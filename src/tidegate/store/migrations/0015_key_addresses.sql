-- Where a key may be used from: addresses and ranges as a JSON list; empty allows any.

alter table keys add column
    addresses text not null default '';
