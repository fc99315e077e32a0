"""Objectives: each gives a *sum* over samples and, before any forward pass, the *count* that divides it.

Sums and counts, never means: a step over several micro-batches divides by the counts of all of them, so that its
gradient does not depend on how the samples are split into micro-batches. Add an objective with one entry in
`OBJECTIVES`, or by passing the trainer an object.

base             `Objective`, and `LossTerms`, which divides the sums of a step
contrastive      pairs against other pairs of the batch, or of all ranks' batches; effect of the batch size
masked_language  hidden tokens
names            `OBJECTIVES`, `parse_objectives`, and a model's own loss

Costs B x B similarities; matching runs the fusion on up to 3 B pairs; masked language modelling encodes the
texts once more. Contrastive and matching need pairs; only masked language modelling learns from text-only
samples, and no objective from image-only samples.
"""
