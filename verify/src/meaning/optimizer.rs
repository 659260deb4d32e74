//! What optimizers do, in plain lines that know nothing of graphs.

use ir::graph::Param;
use ir::model::{Optimizer, Train};

/// What all parameters of a step have in common.
pub struct StepScalars {
    /// The learning rate, before a parameter's own factor.
    pub rate: f64,
    pub number: f64,
    /// What gradients are multiplied by before they are used: clips, and undoes the loss scale.
    pub factor: f64,
}

/// `sqrt(sum g^2)` of true gradients: those of a scaled loss are divided by the scale.
pub fn norm(gradients: impl Iterator<Item = f64>, scale: f64) -> f64 {
    gradients.map(|g| (g / scale).powi(2)).sum::<f64>().sqrt()
}

/// `min(1, clip / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` has it, over the loss scale.
pub fn factor(clip: Option<f64>, norm: f64, scale: f64) -> f64 {
    clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0)) / scale
}

/// The new value of one element of a parameter and of its states, from those before.
pub fn update(train: &Train, step: &StepScalars, param: &Param, p: f64, g: f64, states: &[f64]) -> (f64, Vec<f64>) {
    let g = g * step.factor;
    let rate = step.rate * param.lr_scale.0;
    let decay = if param.decay { train.weight_decay.0 } else { 0.0 };
    match train.optimizer {
        // This is algorithm 2 of Loshchilov & Hutter 2019, with decay that does not enter the gradient. Muon updates
        // with it all parameters that are no hidden matrices; those are updated as a whole.
        Optimizer::AdamW { beta1, beta2, eps } | Optimizer::Muon { beta1, beta2, eps, .. } => {
            let m = beta1.0 * states[0] + (1.0 - beta1.0) * g;
            let v = beta2.0 * states[1] + (1.0 - beta2.0) * g * g;
            let m_hat = m / (1.0 - beta1.0.powf(step.number));
            let v_hat = v / (1.0 - beta2.0.powf(step.number));
            (p - rate * decay * p - rate * m_hat / (v_hat.sqrt() + eps.0), vec![m, v])
        }
        // This is `torch.optim.SGD` without dampening.
        Optimizer::Sgd { momentum } => {
            let g = g + decay * p;
            if momentum.0 == 0.0 {
                return (p - rate * g, vec![]);
            }
            let v = momentum.0 * states[0] + g;
            (p - rate * v, vec![v])
        }
        // This is algorithm 2 of Chen et al. 2023: one mean gives the direction, and another one is kept as the
        // state.
        Optimizer::Lion { beta1, beta2 } => {
            let way = beta1.0 * states[0] + (1.0 - beta1.0) * g;
            let sign = if way == 0.0 { 0.0 } else { way.signum() };
            (p - rate * (sign + decay * p), vec![beta2.0 * states[0] + (1.0 - beta2.0) * g])
        }
    }
}

/// How many states an optimizer keeps of a parameter, which is a hidden matrix or not.
pub fn states(train: &Train, is_matrix: bool) -> usize {
    match train.optimizer {
        Optimizer::Muon { .. } if is_matrix => 1,
        Optimizer::AdamW { .. } | Optimizer::Muon { .. } => 2,
        Optimizer::Sgd { momentum } => usize::from(momentum.0 != 0.0),
        Optimizer::Lion { .. } => 1,
    }
}
