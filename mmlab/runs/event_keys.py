"""The one table of every kind of event and every key that an event may carry, with units.

A new key is one line here: `RunLog` refuses keys that are not in the table, so no view has to guess a unit.
`python -m mmlab.runs.event_keys` prints the tables of docs/events.md.
"""

from __future__ import annotations

from typing import NamedTuple

EVENT_KINDS = {
    "start": "the run begins, or goes on from a checkpoint: its whole configuration",
    "step": "one optimizer step",
    "eval": "one evaluation on held-out samples",
    "device": "one reading of the device, by the monitor's thread at a fixed interval",
    "epoch": "an epoch is complete",
    "checkpoint": "a checkpoint is on disk",
    "warning": "something that a person should see; the run goes on",
    "out_of_memory": "a step ran out of memory, and how it was done all the same",
    "decision": "the batch budget was changed at run time, and why",
    "pause": "training waits from here on, because somebody asked for it",
    "resume": "training goes on after a pause, or ends",
    "stage": "one stage of the input pipeline since its last report",
    "bad_sample": "a sample could not be read, and what came in its place",
    "end": "the run ends, whichever way",
}


class EventKey(NamedTuple):
    """One row of the key table."""

    kinds: str  # kinds of event that carry the key, separated by spaces
    unit: str
    meaning: str


EVENT_KEYS = {
    # the run
    "run_name": EventKey("start", "text", "name of the run, or of the comparison's arm"),
    "scheduler": EventKey("start", "text", "name of the batch scheduler"),
    "model": EventKey("start", "text", "name or preset of the model"),
    "objective": EventKey("start", "text", "training objective"),
    "precision": EventKey("start", "text", "fp32, tf32, bf16 or fp16"),
    "device": EventKey("start device", "text", "torch device: cpu, cuda:0"),
    "device_name": EventKey("start", "text", "the device's own name"),
    "world_size": EventKey("start", "count", "number of ranks"),
    "seed": EventKey("start", "integer", "seed of the run"),
    "batch_size": EventKey("start", "samples", "batch size asked for, where the scheduler has one"),
    "budget": EventKey("start", "cost units", "budget asked for, where the scheduler has one"),
    "num_workers": EventKey("start", "count", "data-loading worker processes"),
    "accumulation_steps": EventKey("start", "batches", "batches in one optimizer step"),
    "num_epochs": EventKey("start", "epochs", "epochs planned"),
    "num_steps": EventKey("start epoch end", "steps", "optimizer steps planned (start) or done (epoch, end)"),
    "num_parameters": EventKey("start", "count", "trainable parameters"),
    "planned_cost": EventKey("start", "cost units", "the plans' cost of all epochs"),
    "process_id": EventKey("start", "integer", "the process that trains, on `host_name`"),
    "host_name": EventKey("start", "text", "the machine that trains"),
    "boot_id": EventKey("start", "text", "which start of the machine's system it was"),
    "process_start_s": EventKey("start", "s", "when the process began, on the machine's own clock"),
    "config": EventKey("start", "object", "every option of the run, nested"),
    "versions": EventKey("start", "object", "versions of Python and of the libraries used"),
    # the batch and its plan
    "epoch": EventKey("step eval epoch checkpoint", "epochs", "epoch, counted from 0"),
    "num_samples": EventKey("step eval epoch", "samples", "samples in the step, the evaluation or the epoch"),
    "num_batches": EventKey("step epoch", "batches", "batches in the step or the epoch"),
    "num_tokens": EventKey("step", "tokens", "T: padded text length, the longest of the step's batches"),
    "height": EventKey("step", "pixels", "H: padded image height, the largest of the step's batches"),
    "width": EventKey("step", "pixels", "W: padded image width, the largest of the step's batches"),
    "text_waste": EventKey("step epoch", "ratio 0-1", "share of text positions that is padding"),
    "image_waste": EventKey("step epoch", "ratio 0-1", "share of 16 x 16 image patches that is padding"),
    "combined_waste": EventKey("step epoch", "ratio 0-1", "share of text and image tokens that is padding"),
    "predicted_cost": EventKey("step", "cost units", "the plan's cost of the step"),
    "predicted_s": EventKey("step", "s", "the plan's duration of the step"),
    "predicted_bytes": EventKey("step out_of_memory", "bytes", "the plan's peak memory of the step"),
    # learning
    "loss": EventKey(
        "step eval epoch",
        "number",
        "loss, a mean over samples: of the batch (step), held out (eval), of the epoch",
    ),
    "contrastive_loss": EventKey("step eval epoch", "number", "image-text contrastive part of the loss"),
    "matching_loss": EventKey("step eval epoch", "number", "image-text matching part of the loss"),
    "masked_language_loss": EventKey(
        "step eval epoch", "number", "part of the loss for telling hidden tokens, a mean over tokens"
    ),
    "masked_language_pair_loss": EventKey("eval", "number", "the same for texts with an image"),
    "masked_language_text_loss": EventKey("eval", "number", "the same without showing the image"),
    "image_to_text_loss": EventKey("eval", "number", "half of `loss`: images choose among texts"),
    "text_to_image_loss": EventKey("eval", "number", "the other half: texts choose among images"),
    "contrastive_weight": EventKey("step", "factor", "of the contrastive part in the step's gradient"),
    "matching_weight": EventKey("step", "factor", "of the matching part"),
    "masked_language_weight": EventKey("step", "factor", "of the part for hidden tokens"),
    "lr": EventKey("step", "number", "learning rate of the first parameter group"),
    "grad_norm": EventKey("step", "number", "L2 norm of the gradient before clipping"),
    "image_grad_norm": EventKey("step", "number", "the same of the image encoder's gradient alone"),
    "text_grad_norm": EventKey("step", "number", "the same of the text encoder's"),
    "fusion_grad_norm": EventKey("step", "number", "the same of the fusion's"),
    "heads_grad_norm": EventKey("step", "number", "the same of everything else's"),
    "loss_scale": EventKey("step", "number", "gradient scaler's factor; 1 without a scaler"),
    "skipped": EventKey("step", "true or false", "the scaler skipped this update because of an overflow"),
    "image_to_text_r1": EventKey("eval", "ratio 0-1", "images with a text of theirs among the best 1"),
    "image_to_text_r5": EventKey("eval", "ratio 0-1", "images with a text of theirs among the best 5"),
    "image_to_text_r10": EventKey("eval", "ratio 0-1", "images with a text of theirs among the best 10"),
    "text_to_image_r1": EventKey("eval", "ratio 0-1", "texts with their image among the best 1"),
    "text_to_image_r5": EventKey("eval", "ratio 0-1", "texts with their image among the best 5"),
    "text_to_image_r10": EventKey("eval", "ratio 0-1", "texts with their image among the best 10"),
    "chance_r1": EventKey("eval", "ratio 0-1", "R@1 that a random ranking would reach"),
    "alignment": EventKey("eval", "number", "mean squared distance of a pair's embeddings, 2 by chance"),
    "image_uniformity": EventKey(
        "eval", "number", "log of how near images lie to each other, 0 if all are one"
    ),
    "text_uniformity": EventKey(
        "eval", "number", "log of how near texts lie to each other, 0 if all are one"
    ),
    "modality_gap": EventKey("eval", "number", "distance between the mean image and the mean text"),
    # time
    "step_s": EventKey(
        "step", "s", "from the end of the previous step to the end of this one, device synchronised"
    ),
    "data_wait_s": EventKey("step", "s", "part of `step_s` spent waiting for the loader"),
    "rank_wait_s": EventKey(
        "step", "s", "part of `step_s` spent in short exchanges with other ranks, beyond what these cost"
    ),
    "predicted_wait_ratio": EventKey(
        "step", "ratio 0-1", "what a rank should wait by its batches' padded sizes: 1 - its work / the most"
    ),
    "samples_per_s": EventKey("step eval epoch", "samples/s", "samples over time"),
    "eval_s": EventKey("eval", "s", "duration of the evaluation"),
    "epoch_s": EventKey("epoch", "s", "duration of the epoch"),
    "checkpoint_s": EventKey("checkpoint", "s", "time to write the checkpoint"),
    "run_s": EventKey("end", "s", "from start to end of the run"),
    # memory and device
    "peak_bytes": EventKey(
        "step eval out_of_memory", "bytes", "peak memory within the step, as counted by `memory_source`"
    ),
    "allocated_bytes": EventKey("step device", "bytes", "held by live tensors, as torch's allocator counts"),
    "reserved_bytes": EventKey("step device", "bytes", "taken from the device by torch's allocator"),
    "memory_bytes": EventKey("device", "bytes", "memory in use, as counted by `memory_source`"),
    "memory_total_bytes": EventKey("device", "bytes", "memory there is, of the same source"),
    "memory_source": EventKey(
        "step eval device",
        "text",
        "what counted: NVML, torch allocator, live tensors, process RSS",
    ),
    "utilization_ratio": EventKey(
        "device", "ratio 0-1", "busy share since the reading before, by `utilization_source`"
    ),
    "utilization_source": EventKey("device", "text", "what measured the use: NVML or process CPU"),
    "memory_utilization_ratio": EventKey(
        "device", "ratio 0-1", "share of time in which the device's memory was read or written"
    ),
    "process_bytes": EventKey(
        "device", "bytes", "memory of the device that this process holds, as NVML counts"
    ),
    "process_utilization_ratio": EventKey("device", "ratio 0-1", "the process's part of `utilization_ratio`"),
    "power_w": EventKey("device", "W", "electrical power that the device draws"),
    "power_limit_w": EventKey("device", "W", "the most that it may draw"),
    "temperature_c": EventKey("device", "degrees C", "temperature of the device"),
    "sm_clock_mhz": EventKey("device", "MHz", "clock of the arithmetic units"),
    "memory_clock_mhz": EventKey("device", "MHz", "clock of the device's memory"),
    "throttle_reasons": EventKey("device", "text", "why the clocks are held back; empty if they are not"),
    "pcie_sent_bytes_per_s": EventKey("device", "bytes/s", "from the device over PCIe, during 20 ms"),
    "pcie_received_bytes_per_s": EventKey("device", "bytes/s", "to the device over PCIe, during 20 ms"),
    "reading_s": EventKey("device", "s", "time that the reading took"),
    "monitor_cpu_s": EventKey("device", "s", "CPU time used by the monitor's thread since its start"),
    "rss_bytes": EventKey("step device", "bytes", "resident memory of this process"),
    # memory planned against memory met
    "num_parts": EventKey(
        "step out_of_memory", "count", "parts that the largest micro-batch was cut into to fit; 1 normally"
    ),
    "num_out_of_memory": EventKey("step end", "count", "times that the step (the run) ran out of memory"),
    "phase": EventKey("out_of_memory", "text", "what ran out: forward, backward, step or evaluation"),
    "operation": EventKey("out_of_memory", "text", "the error's own first line"),
    "action": EventKey("decision", "text", "raise, lower or hold"),
    "reason": EventKey("decision", "text", "why, for a person"),
    "limit_bytes": EventKey("step decision out_of_memory", "bytes", "memory that training may use"),
    "margin_ratio": EventKey("decision", "ratio 0-1", "share of the limit that is kept free"),
    "correction_factor": EventKey("decision", "factor", "on predicted bytes, learnt from observed peaks"),
    "old_value": EventKey(
        "decision", "number", "batch size (halving) or budget in bytes (predictive) before"
    ),
    "new_value": EventKey("decision", "number", "the same after"),
    "num_replanned": EventKey("decision", "samples", "samples of the epoch that were planned anew"),
    # the input pipeline
    "stage": EventKey("stage", "text", "read, decode, collate, copy; train is what takes the batches"),
    "items_per_s": EventKey("stage", "samples/s", "finished by the stage"),
    "busy_ratio": EventKey("stage", "ratio 0-1", "share of its threads' time that the stage worked"),
    "wait_ratio": EventKey(
        "stage", "ratio 0-1", "share of its threads' time spent waiting for input or room"
    ),
    "queue_depth": EventKey("stage", "items", "finished items waiting for the next stage, on average"),
    "num_threads": EventKey("stage", "count", "threads or processes of the stage"),
    "cache_hit_ratio": EventKey("stage", "ratio 0-1", "share of reads that the cache answered"),
    "cache_bytes": EventKey("stage", "bytes", "size of the cache"),
    "record_id": EventKey("bad_sample", "text", "id of the sample"),
    "image_path": EventKey("bad_sample", "text", "file that could not be read"),
    "policy": EventKey("bad_sample", "text", "raise, skip or replace"),
    "replaced_by": EventKey("bad_sample", "text", "id of the sample that came in its place"),
    # messages and files
    "paused_s": EventKey(
        "resume end", "s", "time that training waited on request: in this pause, in the run"
    ),
    "message": EventKey("warning end bad_sample", "text", "what happened, for a person"),
    "source": EventKey("warning", "text", "part of mmlab that warns"),
    "traceback": EventKey("warning end", "text", "traceback of the error behind it"),
    "status": EventKey("end", "text", "done, stopped or failed"),
    "path": EventKey("checkpoint", "text", "file written, relative to the run's folder"),
    "checkpoint_bytes": EventKey("checkpoint", "bytes", "size of the checkpoint"),
}
USER_PREFIX = "user_"  # keys that begin so are the user's own and need no row in the table


def keys_table() -> str:
    """The tables of kinds and keys in Markdown."""
    lines = ["| kind | when |", "|---|---|"]
    lines += [f"| `{kind}` | {when} |" for kind, when in EVENT_KINDS.items()]
    lines += ["", "| key | in | unit | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(key.kinds.split())} | {key.unit} | {key.meaning} |"
        for name, key in EVENT_KEYS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(keys_table())
