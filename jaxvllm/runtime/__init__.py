"""The device room: mesh, device state, sampler, the compiled step and who dispatches it."""
