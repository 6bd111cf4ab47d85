//! Properties of every operator against its f64 reference, on the CPU backend and on every kernel that the card can
//! run; and what happens where a device does not fit.

mod arguments;
mod cascade;
mod fallback;
mod faults;
mod harness;
mod invariance;
mod latent;
mod nothing;
mod packed;
mod places;

mod moe;

macro_rules! modules {
    ($($op:ident $name:literal $tables:tt;)*) => {
        $(mod $op;)*
    };
}
abi::for_each_operator!(modules);
