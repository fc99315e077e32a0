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


class Key(NamedTuple):
    """One row of the key table."""

    kinds: str  # kinds of event that carry the key, separated by spaces
    unit: str
    meaning: str


EVENT_KEYS = {
    # the run
    "run_name": Key("start", "text", "name of the run, or of the comparison's arm"),
    "scheduler": Key("start", "text", "name of the batch scheduler"),
    "model": Key("start", "text", "name or preset of the model"),
    "objective": Key("start", "text", "training objective"),
    "precision": Key("start", "text", "fp32, tf32, bf16 or fp16"),
    "device": Key("start device", "text", "torch device: cpu, cuda:0"),
    "device_name": Key("start", "text", "the device's own name"),
    "world_size": Key("start", "count", "number of ranks"),
    "seed": Key("start", "integer", "seed of the run"),
    "batch_size": Key("start", "samples", "batch size asked for, where the scheduler has one"),
    "budget": Key("start", "cost units", "budget asked for, where the scheduler has one"),
    "num_workers": Key("start", "count", "data-loading worker processes"),
    "accumulation_steps": Key("start", "batches", "batches in one optimizer step"),
    "num_epochs": Key("start", "epochs", "epochs planned"),
    "num_steps": Key("start epoch end", "steps", "optimizer steps planned (start) or done (epoch, end)"),
    "num_parameters": Key("start", "count", "trainable parameters"),
    "planned_cost": Key("start", "cost units", "the plans' cost of all epochs"),
    "process_id": Key("start", "integer", "the process that trains, on `host_name`"),
    "host_name": Key("start", "text", "the machine that trains"),
    "boot_id": Key("start", "text", "which start of the machine's system it was"),
    "process_start_s": Key("start", "s", "when the process began, on the machine's own clock"),
    "config": Key("start", "object", "every option of the run, nested"),
    "versions": Key("start", "object", "versions of Python and of the libraries used"),
    # the batch and its plan
    "epoch": Key("step eval epoch checkpoint", "epochs", "epoch, counted from 0"),
    "num_samples": Key("step eval epoch", "samples", "samples in the step, the evaluation or the epoch"),
    "num_batches": Key("step epoch", "batches", "batches in the step or the epoch"),
    "num_tokens": Key("step", "tokens", "T: padded text length, the longest of the step's batches"),
    "height": Key("step", "pixels", "H: padded image height, the largest of the step's batches"),
    "width": Key("step", "pixels", "W: padded image width, the largest of the step's batches"),
    "text_waste": Key("step epoch", "ratio 0-1", "share of text positions that is padding"),
    "image_waste": Key("step epoch", "ratio 0-1", "share of 16 x 16 image patches that is padding"),
    "combined_waste": Key("step epoch", "ratio 0-1", "share of text and image tokens that is padding"),
    "predicted_cost": Key("step", "cost units", "the plan's cost of the step, where the loader has a plan"),
    "padded_cost": Key("step", "cost units", "tokens and patches with padding, counted in the batches"),
    "predicted_s": Key("step", "s", "the plan's duration of the step"),
    "predicted_bytes": Key("step out_of_memory", "bytes", "the plan's peak memory of the step"),
    # learning
    "loss": Key("step eval epoch", "number", "mean over samples: of the step, held out (eval), of the epoch"),
    "contrastive_loss": Key("step eval epoch", "number", "image-text contrastive part of the loss"),
    "matching_loss": Key("step eval epoch", "number", "image-text matching part of the loss"),
    "masked_language_loss": Key("step eval epoch", "number", "mean over hidden tokens"),
    "masked_language_pair_loss": Key("eval", "number", "the same for texts with an image"),
    "masked_language_text_loss": Key("eval", "number", "the same without showing the image"),
    "image_to_text_loss": Key("eval", "number", "half of `loss`: images choose among texts"),
    "text_to_image_loss": Key("eval", "number", "the other half: texts choose among images"),
    "contrastive_weight": Key("step", "factor", "of the contrastive part in the step's gradient"),
    "matching_weight": Key("step", "factor", "of the matching part"),
    "masked_language_weight": Key("step", "factor", "of the part for hidden tokens"),
    "lr": Key("step", "number", "learning rate of the first parameter group"),
    "grad_norm": Key("step", "number", "L2 norm of the gradient before clipping"),
    "image_grad_norm": Key("step", "number", "the same of the image encoder's gradient alone"),
    "text_grad_norm": Key("step", "number", "the same of the text encoder's"),
    "fusion_grad_norm": Key("step", "number", "the same of the fusion's"),
    "heads_grad_norm": Key("step", "number", "the same of everything else's"),
    "loss_scale": Key("step", "number", "gradient scaler's factor; 1 without a scaler"),
    "skipped": Key("step", "true or false", "the scaler skipped this update because of an overflow"),
    "image_to_text_r1": Key("eval", "ratio 0-1", "images with a text of theirs among the best 1"),
    "image_to_text_r5": Key("eval", "ratio 0-1", "images with a text of theirs among the best 5"),
    "image_to_text_r10": Key("eval", "ratio 0-1", "images with a text of theirs among the best 10"),
    "text_to_image_r1": Key("eval", "ratio 0-1", "texts with their image among the best 1"),
    "text_to_image_r5": Key("eval", "ratio 0-1", "texts with their image among the best 5"),
    "text_to_image_r10": Key("eval", "ratio 0-1", "texts with their image among the best 10"),
    "chance_r1": Key("eval", "ratio 0-1", "R@1 that a random ranking would reach"),
    "alignment": Key("eval", "number", "mean squared distance of a pair's embeddings, 2 by chance"),
    "image_uniformity": Key("eval", "number", "log of how near images lie to each other, 0 if all are one"),
    "text_uniformity": Key("eval", "number", "log of how near texts lie to each other, 0 if all are one"),
    "modality_gap": Key("eval", "number", "distance between the mean image and the mean text"),
    # time
    "step_s": Key("step", "s", "from the end of the step before to the end of this one, device synchronised"),
    "data_wait_s": Key("step", "s", "part of `step_s` spent waiting for the loader"),
    "rank_wait_s": Key(
        "step", "s", "part of `step_s` in short exchanges with other ranks, most of it waiting"
    ),
    "samples_per_s": Key("step eval epoch", "samples/s", "samples over time"),
    "eval_s": Key("eval", "s", "duration of the evaluation"),
    "epoch_s": Key("epoch", "s", "duration of the epoch"),
    "checkpoint_s": Key("checkpoint", "s", "time to write the checkpoint"),
    "run_s": Key("end", "s", "from start to end of the run"),
    # memory and device
    "peak_bytes": Key("step eval out_of_memory", "bytes", "peak memory within the step, by `memory_source`"),
    "allocated_bytes": Key("step device", "bytes", "held by live tensors, as torch's allocator counts"),
    "reserved_bytes": Key("step device", "bytes", "taken from the device by torch's allocator"),
    "memory_bytes": Key("device", "bytes", "memory in use, as counted by `memory_source`"),
    "memory_total_bytes": Key("device", "bytes", "memory there is, of the same source"),
    "memory_source": Key("step eval device", "text", "NVML, torch allocator, live tensors or process RSS"),
    "utilization_ratio": Key("device", "ratio 0-1", "busy share since the reading before, by its source"),
    "utilization_source": Key("device", "text", "what measured the use: NVML or process CPU"),
    "memory_utilization_ratio": Key("device", "ratio 0-1", "share of time that its memory was in use"),
    "process_bytes": Key("device", "bytes", "memory of the device that this process holds, by NVML"),
    "process_utilization_ratio": Key("device", "ratio 0-1", "the process's part of `utilization_ratio`"),
    "power_w": Key("device", "W", "electrical power that the device draws"),
    "power_limit_w": Key("device", "W", "the most that it may draw"),
    "temperature_c": Key("device", "degrees C", "temperature of the device"),
    "sm_clock_mhz": Key("device", "MHz", "clock of the arithmetic units"),
    "memory_clock_mhz": Key("device", "MHz", "clock of the device's memory"),
    "throttle_reasons": Key("device", "text", "why the clocks are held back; empty if they are not"),
    "pcie_sent_bytes_per_s": Key("device", "bytes/s", "from the device over PCIe, during 20 ms"),
    "pcie_received_bytes_per_s": Key("device", "bytes/s", "to the device over PCIe, during 20 ms"),
    "reading_s": Key("device", "s", "time that the reading took"),
    "monitor_cpu_s": Key("device", "s", "CPU time used by the monitor's thread since its start"),
    "rss_bytes": Key("step device", "bytes", "resident memory of this process"),
    # memory planned against memory met
    "num_parts": Key("step out_of_memory", "count", "parts that a micro-batch was cut into; 1 normally"),
    "num_out_of_memory": Key("step end", "count", "times that the step (the run) ran out of memory"),
    "phase": Key("out_of_memory", "text", "what ran out: forward, backward, step or evaluation"),
    "operation": Key("out_of_memory", "text", "the error's own first line"),
    "action": Key("decision", "text", "raise, lower or hold"),
    "reason": Key("decision", "text", "why, for a person"),
    "limit_bytes": Key("step decision out_of_memory", "bytes", "memory that training may use"),
    "margin_ratio": Key("decision", "ratio 0-1", "share of the limit that is kept free"),
    "correction_factor": Key("decision", "factor", "on predicted bytes, learnt from observed peaks"),
    "old_value": Key("decision", "number", "batch size (halving) or budget in bytes (predictive) before"),
    "new_value": Key("decision", "number", "the same after"),
    "num_replanned": Key("decision", "samples", "samples of the epoch that were planned anew"),
    # the input pipeline
    "stage": Key("stage", "text", "read, decode, collate, copy; train is what takes the batches"),
    "items_per_s": Key("stage", "samples/s", "finished by the stage"),
    "busy_ratio": Key("stage", "ratio 0-1", "share of its threads' time that the stage worked"),
    "wait_ratio": Key("stage", "ratio 0-1", "share of its threads' time spent waiting for input or room"),
    "queue_depth": Key("stage", "items", "finished items waiting for the next stage, on average"),
    "num_threads": Key("stage", "count", "threads or processes of the stage"),
    "cache_hit_ratio": Key("stage", "ratio 0-1", "share of reads that the cache answered"),
    "cache_bytes": Key("stage", "bytes", "size of the cache"),
    "record_id": Key("bad_sample", "text", "id of the sample"),
    "image_path": Key("bad_sample", "text", "file that could not be read"),
    "policy": Key("bad_sample", "text", "raise, skip or replace"),
    "replaced_by": Key("bad_sample", "text", "id of the sample that came in its place"),
    # messages and files
    "paused_s": Key("resume end", "s", "time that training waited on request: in this pause, in the run"),
    "message": Key("warning end bad_sample", "text", "what happened, for a person"),
    "source": Key("warning", "text", "part of mmlab that warns"),
    "traceback": Key("warning end", "text", "traceback of the error behind it"),
    "status": Key("end", "text", "done, stopped or failed"),
    "path": Key("checkpoint", "text", "file written, relative to the run's folder"),
    "checkpoint_bytes": Key("checkpoint", "bytes", "size of the checkpoint"),
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
