//! Sizes of 0 through every kernel of every operator, not only through the one that a plan picks: each operator says
//! which of its sizes can be 0.

use proptest::test_runner::TestCaseError;

macro_rules! operators {
    ($($op:ident $name:literal $tables:tt;)*) => {$(
        #[test]
        fn $op() -> Result<(), TestCaseError> {
            crate::$op::nothing()
        }
    )*};
}
abi::for_each_operator!(operators);
