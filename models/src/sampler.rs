//! Choosing the next tokens from a session's logits.

use abi::DType;

use super::{ModelError, Session};
use host::Error;
use host::Tensor;
use host::ops::sampling::{self, Sampling, SamplingArgs, SamplingProblem};

/// Draws the next token of every sequence of a session, each time with a new random number.
#[derive(Debug)]
pub struct SessionSampler {
    plan: sampling::Sampler,
    ids: Tensor,
    step: u64,
}

impl SessionSampler {
    /// A sampler for sessions of this one's model and batch size.
    pub fn new(session: &Session, method: Sampling) -> Result<Self, Error> {
        let (rows, vocab) = (session.options().batch, session.model().config().decoder.vocab_size);
        let problem = SamplingProblem { rows, vocab, dtype: DType::F32, method };
        let plan = sampling::Sampler::plan(session.model().device(), problem)?;
        Ok(SessionSampler { plan, ids: Tensor::empty(session.stream(), &[rows], DType::U32)?, step: 0 })
    }

    /// The next tokens, from the logits of the session's last call; waits for them.
    ///
    /// **Errors**: [`Error::Invalid`] before the first call of the session and after one that failed;
    /// [`ModelError::NanLogits`] where a sequence has no logit that is a number.
    pub fn sample(&mut self, session: &Session) -> Result<Vec<u32>, Error> {
        let (stream, logits) = (session.stream(), session.logits()?.view());
        let rows = logits.shape()[0];
        if rows == 0 {
            let got = "a session without logits";
            return Err(Error::invalid(
                "SessionSampler",
                "session",
                "a prompt or a decode step that went well",
                got,
            ));
        }
        let ids = self.ids.view_mut().slice(0, 0..rows)?;
        self.plan.run(stream, SamplingArgs { logits, ids, step: self.step })?;
        self.step += 1;
        let ids: Vec<u32> = self.ids.view().slice(0, 0..rows)?.to_vec(stream)?;
        // The operator has token 0 for a row of nothing but NaN: only there is it worth a look.
        for (row, _) in ids.iter().enumerate().filter(|&(_, &id)| id == 0) {
            let logits: Vec<f32> = logits.slice(0, row..row + 1)?.to_vec(stream)?;
            if logits.iter().all(|logit| logit.is_nan()) {
                let sequence = session.sequence_of(row);
                return Err(ModelError::NanLogits { sequence, dtype: session.model().dtype() }.into());
            }
        }
        Ok(ids)
    }
}
