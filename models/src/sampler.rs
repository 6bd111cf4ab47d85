//! Choosing the next tokens from a session's logits.

use abi::DType;

use super::{ModelError, Session};
use host::Error;
use host::Tensor;
use host::ops::sampling::{
    self, NO_TOKEN, PARAMS_LEN, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem,
};

/// Draws the next token of every sequence of a session, each time with a new random number.
#[derive(Debug)]
pub struct SessionSampler {
    problem: SamplingProblem,
    plan: sampling::Sampler,
    /// Of each sequence.
    params: Vec<SamplingParams>,
    /// Those of the rows of a call, there and here; none where all are greedy.
    table: Tensor,
    words: Vec<u32>,
    ids: Tensor,
    step: u64,
}

impl SessionSampler {
    /// A sampler for sessions of this one's model and batch size: each sequence by the same parameters, but for its
    /// seed, which is greater by its index.
    ///
    /// **Errors**: as [`Self::of_sequences`].
    pub fn new(session: &Session, params: SamplingParams) -> Result<Self, Error> {
        let of = |sequence| SamplingParams { seed: params.seed.wrapping_add(sequence), ..params };
        Self::of_sequences(session, (0..session.options().batch as u64).map(of).collect())
    }

    /// [`Self::new`] with parameters of its own for each sequence. Their steps are counted here, beginning at 0.
    ///
    /// **Errors**: [`Error::Invalid`] for parameters that the operator refuses, for those of a history, bias or mask,
    /// which a session does not keep, and for another number than the session has sequences.
    pub fn of_sequences(session: &Session, params: Vec<SamplingParams>) -> Result<Self, Error> {
        let (rows, vocab) = (session.options().batch, session.model().config().decoder.vocab_size);
        if params.len() != rows {
            let expected = format!("those of {rows} sequences");
            return Err(Error::invalid("SessionSampler", "params", expected, params.len().to_string()));
        }
        let features =
            SamplingFeatures { history: 0, bias: 0, masks: false, ..SamplingFeatures::of(&params) };
        let problem = SamplingProblem { rows, vocab, dtype: DType::F32, features };
        let mut words = vec![0; rows * PARAMS_LEN];
        problem.write_params(&params, &mut words)?;
        let plan = sampling::Sampler::plan(session.model().device(), problem)?;
        let [table, ids] = [&[rows, PARAMS_LEN][..], &[rows]]
            .map(|shape| Tensor::empty(session.stream(), shape, DType::U32));
        Ok(SessionSampler { problem, plan, params, table: table?, words, ids: ids?, step: 0 })
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
        let args = SamplingArgs::new(logits, ids);
        if self.problem.features.draws {
            let words = &mut self.words[..rows * PARAMS_LEN];
            for (row, words) in words.chunks_exact_mut(PARAMS_LEN).enumerate() {
                let params = SamplingParams { step: self.step, ..self.params[session.sequence_of(row)] };
                self.problem.write_params(&[params], words)?;
            }
            let mut table = self.table.view_mut().slice(0, 0..rows)?;
            table.write(stream, words)?;
            self.plan.run(stream, SamplingArgs { params: Some(table.as_view()), ..args })?;
        } else {
            self.plan.run(stream, args)?;
        }
        self.step += 1;
        let ids: Vec<u32> = self.ids.view().slice(0, 0..rows)?.to_vec(stream)?;
        match ids.iter().position(|&id| id == NO_TOKEN) {
            Some(row) => {
                let sequence = session.sequence_of(row);
                Err(ModelError::NanLogits { sequence, dtype: session.model().dtype() }.into())
            }
            None => Ok(ids),
        }
    }
}
