"""Event files of runs, and all that reads them: the file is the only interface between a run and its views.

A run appends `RunEvent`s to its file; panels and the terminal read it; one small control file goes the other
way (pause, resume, stop).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "events": ["RunEvent", "RunLog", "read_events", "read_runs"],
        "meters": ["DeviceMeter", "LiveBytes", "read_device"],
        "follow": ["RunState"],
        "monitor": ["DeviceMonitor"],
    },
)
