//! What becomes of weights as they are loaded.

use crate::checkpoint::Data;
use host::Error;
use host::weight::Scheme;

/// What becomes of the weights of a model's projections. As text: `as-stored`, `dense`, a scheme's name
/// ([`Scheme::NAMED`]), or two with a `+`, of which the second is for tables (`int4+int8`); with `requantise-` before
/// one also weights that are quantised already.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Quantise {
    /// They stay as they are in the checkpoint, quantised or not, and so do the tables of embedding and head. What
    /// kernels have no layout for is dequantised: of experts and tables, columns in an order of their own (GPTQ's
    /// `desc_act`).
    #[default]
    AsStored,
    /// All are dequantised.
    Dense,
    /// Those that are not quantised are, by this scheme, as they are loaded. Tables stay as they are.
    By(Scheme),
    /// The same, and tables of embedding and head that are not quantised are by a scheme of their own. One that ranks
    /// of a group share as embedding and head stays as it is; a scheme with blocks of rows is an error there.
    WithTables {
        /// For projections and experts.
        projections: Scheme,
        /// For the tables.
        tables: Scheme,
    },
    /// All are by this scheme as they are loaded; those that are quantised already from the values that they stand for,
    /// so with the errors of both. Tables are dequantised.
    Requantise(Scheme),
}

impl Quantise {
    /// How many neighbouring columns and rows may not be parted from each other, for the scheme's sake.
    pub(crate) fn unit(self) -> usize {
        self.of_projections().map_or(1, |scheme| scheme.group.max(1) as usize)
    }

    /// The scheme for projections that a file has as floats.
    pub(super) fn of_projections(self) -> Option<Scheme> {
        match self {
            Quantise::By(scheme)
            | Quantise::WithTables { projections: scheme, .. }
            | Quantise::Requantise(scheme) => Some(scheme),
            Quantise::AsStored | Quantise::Dense => None,
        }
    }

    /// The same for tables, as if they were projections.
    pub(super) fn for_tables(self) -> Self {
        match self {
            Quantise::AsStored | Quantise::By(_) => Quantise::AsStored,
            Quantise::WithTables { tables, .. } => Quantise::By(tables),
            Quantise::Dense | Quantise::Requantise(_) => Quantise::Dense,
        }
    }

    /// The scheme by which this tensor of a file is quantised.
    pub(super) fn scheme(self, data: &Data<'_>) -> Option<Scheme> {
        let again = matches!(self, Quantise::Requantise(_));
        self.of_projections().filter(|_| again || !data.is_quantised())
    }
}

impl std::str::FromStr for Quantise {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "as-stored" => Ok(Quantise::AsStored),
            "dense" => Ok(Quantise::Dense),
            _ => match (text.strip_prefix("requantise-"), text.split_once('+')) {
                (Some(scheme), _) => scheme.parse().map(Quantise::Requantise),
                (None, Some((projections, tables))) => {
                    Ok(Quantise::WithTables { projections: projections.parse()?, tables: tables.parse()? })
                }
                (None, None) => text.parse().map(Quantise::By),
            },
        }
    }
}
