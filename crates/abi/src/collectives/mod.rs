//! One module per collective that has kernels of its own: what several devices do together, each on its own tensors.
//!
//! A collective has what an operator has in this crate and in `gpu`: parameters, a table of entry points, and an image
//! of its own per floor. It is no operator, since it runs on a group of devices and not on one: on the host it is a
//! part of `host::group`.

/// Hands every collective to a macro: its module, its name, and the tables of its kernels. The name is a feature of the
/// `gpu` crate, as that of an operator is.
#[macro_export]
macro_rules! for_each_collective {
    ($callback:path) => {
        $callback! {
            all_reduce "all_reduce" [VARIANTS];
        }
    };
}

macro_rules! collectives {
    ($($collective:ident $name:literal [$($table:ident)*];)*) => {
        $(pub mod $collective;)*

        /// Every family of collectives.
        pub const FAMILIES: &[&str] = &[$($name),*];

        /// The names of a family's kernels; none for an unknown family.
        pub fn entries(family: &str) -> impl Iterator<Item = &'static str> {
            let all = core::iter::empty()
                $($(.chain($collective::$table.iter().map(|variant| ($name, variant.entry))))*)*;
            all.filter(move |(name, _)| *name == family).map(|(_, entry)| entry)
        }
    };
}
for_each_collective!(collectives);
