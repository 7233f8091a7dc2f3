"""Types of device behind one seam: `registry.device_type` returns the `base.DeviceType` of a device."""
