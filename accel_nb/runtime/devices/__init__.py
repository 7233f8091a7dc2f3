"""Types of device with one interface: `registry.device_type` returns the `base.DeviceType` of a device."""
