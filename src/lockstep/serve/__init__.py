"""`lockstep serve`: a front that talks HTTP and decides, and one process per replica that computes.

spec          what is served, as JSON
folder        where its sockets are
role          the rollout role in a replica's process: engine, worker, sync
replica_main  that process; process: the front's side of it
relay         lets a trainer's weight sync through the front to a replica
versions      stage, commit, abort by request; catching up of replicas that were lost
server        all of it together
"""
