"""What more devices would give: step time and throughput of each strategy in closed form, from what few devices did.

links    `Link`, `Network`: messages, fitted to probes of several sizes
work     `Work`: seconds of one device, part by part
predict  `predict`: both joined, for any number of devices
outlook  tables over devices, and who wins at which bandwidth

single  one device does it all
reduce  data parallel, gradients summed after the last backward pass
ddp     data parallel, gradients reduced in buckets while the backward pass goes on (ring all-reduce)
fsdp    the same with weights, gradients and moments in shards: two all-gathers and one reduce-scatter a step
branch  image and text on two devices, the fusion beside one of them; such pairs are data parallel among themselves

Every strategy takes the same samples: `batch_size` a device. Does not know: racks, other jobs on the links, input.
Source of the ring's costs: Thakur, Rabenseifner and Gropp 2005 (Int. J. High Perform. Comput. Appl. 19).
"""

from mmlab.parallel.scaling.links import Line, Link, Network, ring
from mmlab.parallel.scaling.outlook import DEVICES, HIGHEST, LOWEST, scaling_rows, winners
from mmlab.parallel.scaling.predict import STRATEGIES, Prediction, predict
from mmlab.parallel.scaling.work import Work

__all__ = [
    "DEVICES",
    "HIGHEST",
    "LOWEST",
    "STRATEGIES",
    "Line",
    "Link",
    "Network",
    "Prediction",
    "Work",
    "predict",
    "ring",
    "scaling_rows",
    "winners",
]
