"""The seeded simulation of the whole engine: the real worker, flow and SQL in virtual time, under faults drawn from one number.

    loop       virtual time, and processes that can be frozen and killed between any two steps
    plan       what a seed means: sizes, settings, which faults and how strong
    families   plans that bring one sort of trouble to light
    estate     what is served and to whom: models, deployments, tenants, limits, weights, the scheduler's mode
    process    one simulated process: its life, its clock, its randomness, its line to the outside
    store_time the clock of the store's machine, which is set, and the store's time above it
    driver     the store's seam: latency, failures before a commit, and commits whose answer is lost
    disk       blobs in memory, with what a crash keeps and what it tears
    provider   the model servers, and the lines to them under the real router; `answers` what they say, `witness` what they write down
    users      interactive calls beside the jobs, and what must come of each
    control_watch  what must hold of jobs that are paused, put off, stopped at a threshold, sampled first or retried
    tide_watch what must hold of background work that stands back for users
    receiver   the receivers of webhooks, and what must hold of the outbox
    work_files which item of a job a tag names
    redis_server  a Redis that forgets, fails over and loses answers, under the real client
    redis_scripts  the real Lua scripts, and the commands that they call
    rules      what must hold at every step, as triggers in the database itself
    meter      what must hold at every call: limits, slots and rests, counted at the witness
    search     what must hold of the search for an item that kills its workers
    fairness   what must hold of the scheduler at every lease
    judge      what must hold at the end
    customers  who sends work in, and when
    engine     a worker over a simulated process's ports
    world      one run
    report     a broken run in words
    mutants    planted bugs that the simulation must catch; `mutants_capacity` those of limits and shares, `planting` how
    mutants_doors  those of users, the tide, groups, messages and webhooks
    mutants_shape  those of the shape of a job's work; `mutants_controls` those of pauses, thresholds, canaries and retries

Nothing on the road of a real job imports it. `python -m tests.simulation.world SEED` replays one run.
"""
