"""The host used as a device with memory of its own: pages that it works on come from the history and go home."""

from kvs_core.device.host.device import HostDevice


class ApartDevice(HostDevice):
    """A host device that says it is none."""

    is_host = False
