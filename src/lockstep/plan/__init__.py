"""`lockstep plan`: what a weight sync would move, from whom to whom, and what it costs, before anything exists.

    answer = lockstep.plan_sync("llama-3.1-8b", actor="fsdp=8", rollout="tensor=4,data=2")
    print(answer.summary)
    answer.plan.bytes_crossing, answer.certificate.ok

Reads configurations only: no weights, no devices, no jax. request.py says what was asked, answer.py plans, proves and
prices it, summary.py, document.py and page.py are the answer as text, JSON and HTML (docs/plan.md).
"""
