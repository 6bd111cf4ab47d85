//! What happens, for subscribers of `tracing`: feature `tracing`, without which these are nothing. All have the target
//! `warpforge`.

#[cfg(all(test, feature = "tracing"))]
mod tests;

/// Whether anybody wants to hear of plans, which take a moment to describe.
pub(crate) fn hears_of_plans() -> bool {
    #[cfg(feature = "tracing")]
    return tracing::enabled!(target: "warpforge", tracing::Level::DEBUG);
    #[cfg(not(feature = "tracing"))]
    false
}

/// A plan is made: `debug`.
pub(crate) fn planned(op: &str, problem: &str, device: &str, variant: &str, why: &str) {
    #[cfg(feature = "tracing")]
    tracing::debug!(target: "warpforge", op, problem, device, variant, why, "planned");
    let _ = (op, problem, device, variant, why);
}

/// A kernel's module is loaded, by the driver's assembler or as machine code: `debug`.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is loaded"))]
pub(crate) fn loaded(module: &str, floor: &str, is_assembled: bool) {
    #[cfg(feature = "tracing")]
    tracing::debug!(target: "warpforge", module, floor, is_assembled, "loaded a module");
    let _ = (module, floor, is_assembled);
}

/// What was asked of a device runs elsewhere: `warn`.
pub(crate) fn fallen(line: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "warpforge", "{line}");
    let _ = line;
}
