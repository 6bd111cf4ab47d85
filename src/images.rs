use host::Image;

/// The device images of this build: one per operator family and architecture floor; none without the feature `cuda`.
#[cfg(feature = "cuda")]
pub static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The device images of this build: one per operator family and architecture floor; none without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub static IMAGES: &[Image] = &[];

#[cfg(feature = "cuda")]
inventory::submit! {
    // SAFETY: `build.rs` has them from this library's `gpu`, and `tests/images.rs` compares its entry points with the
    // tables.
    unsafe { host::ProgramImages::new(IMAGES) }
}
