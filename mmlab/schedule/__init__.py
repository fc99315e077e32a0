"""Which samples form which batch, decided from metadata before a pixel is read.

`make_scheduler("budget", budget=8192).plan(sizes)` gives a `BatchPlan`, which a torch DataLoader takes as its
`batch_sampler`. Costs microseconds per sample; touches no image; loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["Scheduler"],
        "classic": ["BatchScheduler"],
        "cost": ["MaxPolynomial", "PaddedTokens"],
        "mixing": ["Mixed", "Weighted"],
        "plan": ["BatchPlan"],
        "preview": ["Preview", "preview", "read_lengths"],
        "report": ["PlanReport"],
        "schedulers": ["SCHEDULERS", "make_scheduler"],
    },
)
